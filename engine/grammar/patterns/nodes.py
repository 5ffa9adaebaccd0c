r"""Defines the parts of a regular expression, builds patterns from them, and writes them for grammar engines.

A pattern is characters, sequences, alternatives and repeats. The written pattern matches the whole text and has every
class written out, so that an engine's own meaning of `\d`, `.` or a search does not matter.
Never reads a pattern's text (`reader.py`), and never matches a text (`matching.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points in ascending order. Both ends of a range are included. Neighbouring ranges are merged into one.
"""

LAST_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class PatternError(ValueError):
    """Raised if a pattern cannot be enforced, or if matching takes too long. The message says why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Matches one character that is in a set of characters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Run:
    """Matches several patterns one after another. A run of no patterns matches the empty string."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    choices: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: "Node"
    least: int
    most: int | None


Node = Chars | Run | Either | Repeat


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the ranges of all characters that are not in `ranges`. Surrogates never are in the result."""
    left, start = [], 0
    for low, high in normalise([*ranges, SURROGATES]):
        if start < low:
            left.append((start, low - 1))
        start = high + 1
    return tuple([*left, (start, LAST_POINT)] if start <= LAST_POINT else left)


def points(text: str) -> Ranges:
    """Returns the ranges of the characters of a text."""
    return normalise((ord(character), ord(character)) for character in text)


ANY = Chars(complement(()))
ANYTHING = Repeat(ANY, 0, None)


def length_between(least: int, most: int | None) -> Node:
    """Returns a pattern that matches every text of `least` to `most` characters. A `most` of None sets no upper
    limit.
    """
    return Repeat(ANY, least, most)


def none_of(texts: Iterable[str]) -> Node:
    """Returns a pattern that matches every text except the given ones."""
    by_first: dict[str, list[str]] = {}
    texts = list(texts)
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    choices: list[Node] = [] if "" in texts else [Run(())]
    choices.append(Run((Chars(complement((ord(first), ord(first)) for first in by_first)), ANYTHING)))
    choices += [Run((Chars(points(first)), none_of(rest))) for first, rest in by_first.items()]
    return Either(tuple(choices))


def repeats(node: Node) -> int:
    """Returns how often the most repeated part of a pattern is copied if all counted repeats are written out.

    For `(a{3}){4}` the result is 12: written out, the pattern has twelve times `a`.
    """
    match node:
        case Chars():
            return 1
        case Run(parts) | Either(parts):
            return max([1, *(repeats(part) for part in parts)])
        case Repeat(part, least, most):
            return repeats(part) * max(1, least if most is None else most)


def written(node: Node) -> str:
    """Returns the pattern in the syntax of Rust's regular expressions, without anchors."""
    match node:
        case Chars(ranges):
            return f"[{''.join(_written_range(*one) for one in ranges)}]" if ranges else "[^\\x{0}-\\x{10FFFF}]"
        case Run(parts):
            return "".join(written(part) for part in parts)
        case Either(choices):
            return f"(?:{'|'.join(written(choice) for choice in choices)})"
        case Repeat(part, least, most):
            count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
            return f"(?:{written(part)}){count}"


def _written_range(low: int, high: int) -> str:
    return f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
