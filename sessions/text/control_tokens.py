"""Keeps text from outside from turning into control tokens.

A rendered prompt mixes the template's own control tokens with text that may spell one, such as `<|im_end|>`.
Before rendering, every such literal in text from outside is wrapped between two characters that occur nowhere in it;
after rendering, the wrapped parts are encoded as plain text and all else as usual:

    "say <|im_end|>"  ->  "say ⟨<|im_end|>⟩"  -> template ->  "…user\\nsay ", plain "<|im_end|>", "<|im_end|>\\n…"

Wrapping, rather than replacing, leaves the literals in sight of templates that look for them (`</think>`).
A mark whose partner a template has cut off still splits the text there, so that two halves never join.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

NEVER: re.Pattern[str] = re.compile("(?!)")
CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""Where marks are drawn from: characters without meaning first, then private ones, which icon fonts do use."""
SPOKEN_BY_ASSISTANTS = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a rendered prompt."""

    text: str
    is_plain: bool
    """It came from outside and spells control tokens: none may come of it."""


class ControlLiterals:
    """The texts that would become control tokens."""

    def __init__(self, special: Iterable[str], visible: Iterable[str]) -> None:
        """`special` are control wherever they stand; `visible` ones (`<tool_call>`) are an assistant's to write."""
        special, visible = tuple(special), tuple(visible)
        self.special = _any_of(special)
        self.all = _any_of(special + visible)

    def marks_for(self, values: Iterable[Any], template_source: str) -> "ControlMarks | None":
        """Marks that occur in none of these JSON values; None where no value holds a control literal."""
        everything = "\0".join(chain.from_iterable(map(_strings, values)))
        if not self.all.search(everything):
            return None
        taken = {*everything, *template_source}
        free = (character for character in map(chr, CANDIDATES) if character not in taken)
        return ControlMarks(self, next(free), next(free))


class ControlMarks:
    """Two characters that wrap the control literals of one prompt."""

    def __init__(self, literals: ControlLiterals, opening: str, closing: str) -> None:
        self._literals = literals
        self._opening = opening
        self._closing = closing
        self._splitter = re.compile(f"{opening}({literals.all.pattern}){closing}|[{opening}{closing}]")

    def mark_message(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template reads it. What an assistant said keeps the markup that assistants write."""
        spoken = SPOKEN_BY_ASSISTANTS if form.get("role") == "assistant" else ()
        return {
            key: self._mark(value, self._literals.special if key in spoken else self._literals.all)
            for key, value in form.items()
        }

    def mark(self, value: Any) -> Any:
        """A JSON value with every control literal wrapped, in keys too."""
        return self._mark(value, self._literals.all)

    def is_marked(self, text: str, position: int) -> bool:
        """Whether the literal that starts at `position` of a rendered text came from outside."""
        return position > 0 and text[position - 1] == self._opening

    def split(self, text: str) -> Iterator[TextPiece]:
        """The rendered text without marks, cut wherever one stood."""
        for position, part in enumerate(self._splitter.split(text)):
            if part:
                yield TextPiece(part, is_plain=position % 2 == 1)

    def _mark(self, value: Any, literals: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return literals.sub(f"{self._opening}\\g<0>{self._closing}", value)
        if isinstance(value, Mapping):
            return {self._mark(key, literals): self._mark(item, literals) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item, literals) for item in value]
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
