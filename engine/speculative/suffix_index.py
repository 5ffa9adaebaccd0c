"""Where the last tokens of a text stood before in a list of tokens, and what followed them there.

For each of a few lengths n the index remembers the place after the latest occurrence of every n-gram. A dictionary is
filled at the speed of C from slices of the list, so a prompt of a hundred thousand tokens costs milliseconds once, and
a new token a microsecond.
Source: prompt lookup (Saxena 2023), with the latest match instead of the first; the ladder of lengths stands in for the
suffix tree of Oliaro et al. 2024 (SuffixDecoding).
"""

from collections.abc import Sequence
from dataclasses import dataclass

NGRAM_LENGTHS = (8, 3)
"""The longest first: eight tokens seldom agree by chance, three find what is new."""
LONGEST_MATCH = 32
"""A match is followed back no further: by then it is as good as certain."""
BYTES_PER_TOKEN = 2 * 160
"""What a token costs over all n-grams: a tuple, a number, and its places in two dictionaries."""
_FEW = 8
"""Tokens that are entered faster one by one than by columns."""


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """`tokens[position:]` followed the same `match_length` tokens, which is 3, 8, 16 or 32: the most that agree."""

    position: int
    match_length: int


class SuffixIndex:
    """N-grams of a list that others append to; entered only once a token follows them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._following: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in NGRAM_LENGTHS}

    def enter(self, start: int, first: int, end: int) -> None:
        """Enter the n-grams of tokens[start:end] that are followed by a token of tokens[first:end]."""
        for length, following in self._following.items():
            begin = max(first, start + length)
            if end - begin < _FEW:
                for position in range(begin, end):
                    following[tuple(self.tokens[position - length : position])] = position
                continue
            columns = [self.tokens[begin - length + shift : end - length + shift] for shift in range(length)]
            following.update(zip(zip(*columns, strict=True), range(begin, end), strict=True))

    def find(self, tail: Sequence[int]) -> SuffixMatch | None:
        """The latest occurrence of the longest n-gram that `tail` ends with. `tail` holds up to LONGEST_MATCH tokens."""
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
