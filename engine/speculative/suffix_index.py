"""Finds where the last tokens of a text occurred before in a list of tokens.

Owns, for a few lengths n, the position behind the latest occurrence of each n-gram. Never copies the tokens.
Its dictionaries are filled from slices of the list, in C: a prompt of 100,000 tokens takes milliseconds once, and each
new token a microsecond.
Source: prompt lookup (Saxena 2023), with the latest match instead of the first; several lengths replace the suffix
tree of SuffixDecoding (Oliaro et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

NGRAM_LENGTHS = (8, 3)
"""The lengths n, longest first. Eight tokens are seldom equal by chance. Three also find recent repetitions."""
LONGEST_MATCH = 32
"""The longest match that is measured. A longer match would not be more certain."""
BYTES_PER_TOKEN = 2 * 160
"""Memory of one token: its n-gram tuples and positions, and their entries in two dictionaries."""
_FEW = 8
"""Up to this many tokens are added faster one by one than by columns."""


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The `match_length` tokens before `position` equal the last tokens of the text; 3, 8, 16 or 32, the most that are
    equal.
    """

    position: int
    match_length: int


class SuffixIndex:
    """The n-grams of a growing list. An n-gram is added once a token follows it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._following: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in NGRAM_LENGTHS}

    def enter(self, start: int, first: int, end: int) -> None:
        """Adds the n-grams of tokens[start:end] that are followed by a token of tokens[first:end]."""
        for length, following in self._following.items():
            begin = max(first, start + length)
            if end - begin < _FEW:
                for position in range(begin, end):
                    following[tuple(self.tokens[position - length : position])] = position
                continue
            columns = [self.tokens[begin - length + shift : end - length + shift] for shift in range(length)]
            following.update(zip(zip(*columns, strict=True), range(begin, end), strict=True))

    def find(self, tail: Sequence[int]) -> SuffixMatch | None:
        """Returns the latest occurrence of the longest known n-gram that ends `tail`.

        `tail` has up to LONGEST_MATCH tokens.
        """
        for length, following in self._following.items():
            if len(tail) < length:
                continue
            position = following.get(tuple(tail[-length:]))
            if position is not None:
                return SuffixMatch(position, self._agreement(tail, position, length))
        return None

    def _agreement(self, tail: Sequence[int], position: int, known: int) -> int:
        agreed = known
        for length in (LONGEST_MATCH // 2, LONGEST_MATCH):
            if not known < length <= min(len(tail), position):
                break
            if list(self.tokens[position - length : position]) != list(tail[-length:]):
                break
            agreed = length
        return agreed
