"""Stop strings, matched in a text that comes in pieces.

Owns the text that may still turn out to be the beginning of one, and holds back nothing else.
The match that ends first wins, of two that end together the longer one: so the pieces make no difference.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """What a piece of text comes to."""

    text: str
    """What is certain now to be no part of a stop string."""
    matched: str | None = None
    """The stop string that was found right behind `text`."""
    rest: str = ""
    """What of the piece follows it."""


class StopStrings:
    """Looks for several strings at once, each character once (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises InvalidRequest for an empty one."""
        # Longest first, so that of two that end together the longer is found.
        self._cursors = [_Cursor(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._held = ""

    def push(self, text: str) -> StopOutcome:
        """What the next piece of text brings; after a match the search starts anew."""
        if not self._cursors:
            return StopOutcome(text)
        seen = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = [cursor.pattern for cursor in self._cursors if cursor.advance(character)]
            if found:
                self._restart()
                return StopOutcome(seen[: position - len(found[0])], found[0], seen[position:])
        held = max(cursor.matched for cursor in self._cursors)
        self._held = seen[len(seen) - held :]
        return StopOutcome(seen[: len(seen) - held])

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held = self._held
        self._restart()
        return held

    def _restart(self) -> None:
        self._held = ""
        for cursor in self._cursors:
            cursor.matched = 0


class _Cursor:
    """How far one string is matched: `matched` is the longest of its prefixes that the text ends with."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise InvalidRequest("A stop string is empty; leave it out.", param="stop")
        self.pattern = pattern
        self.matched = 0
        self._fallback = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Take one more character; True when it completes the string."""
        matched = self.matched
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched]
        self.matched = matched + (self.pattern[matched] == character)
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """By length of a prefix: its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    for character in pattern[1:]:
        border = borders[-1]
        while border and pattern[border] != character:
            border = borders[border]
        borders.append(border + (pattern[border] == character))
    return borders
