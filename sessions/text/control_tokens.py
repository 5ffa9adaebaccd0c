"""Escapes text of users and tools, so that it never becomes control tokens.

A rendered prompt mixes the template's own control tokens with text that may spell one, such as `<|im_end|>`.
Before rendering, every such literal in the text is wrapped in two mark characters that occur nowhere else.
After rendering, the wrapped parts are encoded as plain text, and the rest as usual:

    "say <|im_end|>"  ->  "say ⟨<|im_end|>⟩"  -> template ->  "…user\\nsay ", plain "<|im_end|>", "<|im_end|>\\n…"

Literals are wrapped and not replaced, because some templates search for them (`</think>`).
If a template has cut off one of the two marks, the other mark still splits the text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

NEVER: re.Pattern[str] = re.compile("(?!)")
CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""Code points of possible marks: first code points without a meaning, then private ones, which some icon fonts use."""
ASSISTANT_FIELDS = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """One part of a rendered prompt."""

    text: str
    is_plain: bool
    """Whether the part was escaped. Then it is encoded without control tokens."""


class ControlTokenTexts:
    """The texts of a vocabulary's control tokens."""

    def __init__(self, special: Iterable[str], visible: Iterable[str]) -> None:
        """`special` texts are escaped everywhere.

        `visible` texts, such as `<tool_call>`, are not escaped in an assistant's text.
        """
        special, visible = tuple(special), tuple(visible)
        self.special = _any_of(special)
        self.all = _any_of(special + visible)

    def escaper_for(self, values: Iterable[Any], template_source: str) -> "ControlTokenEscaper | None":
        """Returns an escaper whose marks occur in none of these JSON values; None if no value spells a control token."""
        everything = "\0".join(chain.from_iterable(map(_strings, values)))
        if not self.all.search(everything):
            return None
        taken = {*everything, *template_source}
        free = (character for character in map(chr, CANDIDATES) if character not in taken)
        return ControlTokenEscaper(self, next(free), next(free))


class ControlTokenEscaper:
    """Wraps the control token texts of one prompt in two mark characters."""

    def __init__(self, literals: ControlTokenTexts, opening: str, closing: str) -> None:
        self._literals = literals
        self._opening = opening
        self._closing = closing
        self._splitter = re.compile(f"{opening}({literals.all.pattern}){closing}|[{opening}{closing}]")

    def escape_message(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message for a template, escaped. The text of an assistant keeps the markup that assistants write."""
        spoken = ASSISTANT_FIELDS if form.get("role") == "assistant" else ()
        return {
            key: self._wrap(value, self._literals.special if key in spoken else self._literals.all)
            for key, value in form.items()
        }

    def escape(self, value: Any) -> Any:
        """Returns a JSON value with all its strings and keys escaped."""
        return self._wrap(value, self._literals.all)

    def is_escaped(self, text: str, position: int) -> bool:
        """Returns whether the text that starts at `position` of a rendered prompt was escaped."""
        return position > 0 and text[position - 1] == self._opening

    def split(self, text: str) -> Iterator[PromptPiece]:
        """Splits a rendered prompt at the marks. The parts do not contain the marks."""
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
