r"""Escapes texts of messages that spell a control token, so that they never become control tokens.

Owns the marks around such spellings. Never encodes text to tokens, and never runs a template.

    "say <|im_end|>"  ->  "say ⟨<|im_end|>⟩"  -> template ->  "…user\nsay ", plain "<|im_end|>", "<|im_end|>\n…"

A text of a user or a tool may spell a control token, such as `<|im_end|>`. Before rendering, each such spelling is put
between two mark characters that occur nowhere else. After rendering, the marked parts are encoded as plain text. The
spellings are kept, because some templates search for them (`</think>`). If a template has cut off one of the two marks,
the other mark still splits the text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

NEVER: re.Pattern[str] = re.compile("(?!)")


CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""The code points that may serve as marks: first those without a meaning, then private ones, which icon fonts may use.
"""


ASSISTANT_FIELDS = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A piece of the text of a rendered prompt. The pieces are encoded to tokens one by one."""

    text: str
    is_plain: bool
    """Whether this piece is the spelling of a control token in a text of a user or a tool.

    Such a piece is encoded as plain text, without control tokens.
    """


class ControlTokenTexts:
    """The texts that spell the control tokens of a vocabulary, such as `<|im_end|>`.

    Makes an escaper for each prompt that has such a text in a message.
    """

    def __init__(self, special: Iterable[str], visible: Iterable[str]) -> None:
        """The texts in `special` are escaped everywhere.

        The texts in `visible`, such as `<tool_call>`, are escaped everywhere except in an assistant's text.
        """
        special, visible = tuple(special), tuple(visible)
        self.special = _any_of(special)
        self.all = _any_of(special + visible)

    def escaper_for(self, values: Iterable[Any], template_source: str) -> "ControlTokenEscaper | None":
        """Returns an escaper for the JSON values of one prompt. Returns None if no value spells a control token.

        The escaper's two mark characters occur neither in the values nor in the template.
        """
        everything = "\0".join(chain.from_iterable(map(_strings, values)))
        if not self.all.search(everything):
            return None
        taken = {*everything, *template_source}
        free = (character for character in map(chr, CANDIDATES) if character not in taken)
        return ControlTokenEscaper(self, next(free), next(free))


class ControlTokenEscaper:
    """Puts each control token spelling, in the strings of one prompt, between two mark characters.

    The marks show later which spellings came from a user or a tool, and must not become control tokens.
    """

    def __init__(self, literals: ControlTokenTexts, opening: str, closing: str) -> None:
        self._literals = literals
        self._opening = opening
        self._closing = closing
        self._splitter = re.compile(f"{opening}({literals.all.pattern}){closing}|[{opening}{closing}]")

    def escape_message(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a message in the form that templates read, with marks around the control token spellings.

        In the text of an assistant, spellings such as `<tool_call>` get no marks, because assistants write them.
        """
        spoken = ASSISTANT_FIELDS if form.get("role") == "assistant" else ()
        return {
            key: self._wrap(value, self._literals.special if key in spoken else self._literals.all)
            for key, value in form.items()
        }

    def escape(self, value: Any) -> Any:
        """Returns a copy of a JSON value, with marks around the control token spellings in all its strings and keys."""
        return self._wrap(value, self._literals.all)

    def is_escaped(self, text: str, position: int) -> bool:
        """Returns whether the control token spelling at `position` of the rendered prompt `text` has marks."""
        return position > 0 and text[position - 1] == self._opening

    def split(self, text: str) -> Iterator[PromptPiece]:
        """Splits a rendered prompt into marked spellings and the texts between them.

        The pieces do not contain the marks.
        """
        for position, part in enumerate(self._splitter.split(text)):
            if part:
                yield PromptPiece(part, is_plain=position % 2 == 1)

    def _wrap(self, value: Any, literals: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return literals.sub(f"{self._opening}\\g<0>{self._closing}", value)
        if isinstance(value, Mapping):
            return {self._wrap(key, literals): self._wrap(item, literals) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._wrap(item, literals) for item in value]
        return value


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, literals), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else NEVER


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
