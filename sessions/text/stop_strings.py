"""Finds stop strings in a text that arrives in pieces.

Owns the last characters of the text while they may be the start of a stop string. Never holds back other text.
Invariant: the result does not depend on how the text is cut into pieces. The match that ends first wins. If two matches
end at the same place, the longer one wins.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """The result of the search for stop strings in one piece of text."""

    text: str
    """The text that is certainly not part of a stop string."""
    matched: str | None = None
    """The stop string that follows `text`; None if none was found."""
    rest: str = ""
    """The rest of the piece, after the stop string."""


class StopStrings:
    """Searches a text for several stop strings at once, and reads each character of the text only once.

    Source: Knuth, Morris and Pratt, 1977.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Makes the search for these strings. Raises InvalidRequest for an empty string."""
        # Longest first: if two strings end at the same place, the longer one is found.
        self._cursors = [_Cursor(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._held = ""

    def push(self, text: str) -> StopOutcome:
        """Reads the next piece of the text, and searches for the first stop string.

        If the end of the piece may be the start of a stop string, holds this end back until a later call.
        After a match, the search starts anew. To search the rest of the piece too, pass this rest to `push`.
        """
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
        """Returns the text that the search still holds back. Call this method after the last piece of text."""
        held = self._held
        self._restart()
        return held

    def _restart(self) -> None:
        self._held = ""
        for cursor in self._cursors:
            cursor.matched = 0


class _Cursor:
    """The match of one string so far. `matched` is the length of its longest prefix at the end of the text."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise InvalidRequest("A stop string is empty; leave it out.", param="stop")
        self.pattern = pattern
        self.matched = 0
        self._fallback = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Reads one character. Returns whether it completes the string."""
        matched = self.matched
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched]
        self.matched = matched + (self.pattern[matched] == character)
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """Returns, for each prefix of the string, the length of its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    for character in pattern[1:]:
        border = borders[-1]
        while border and pattern[border] != character:
            border = borders[border]
        borders.append(border + (pattern[border] == character))
    return borders
