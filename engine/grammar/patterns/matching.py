"""Matches text with patterns, in polynomial time for every pattern. Owns the limit of this work."""

from graftwork.engine.grammar.patterns.nodes import ANYTHING, Chars, Either, Node, PatternError, Repeat, Run


class Fuel:
    """Limits the work of matching patterns. `left` is the number of units that may still be used; a unit is about a
    microsecond.
    """

    def __init__(self, units: int = 200_000) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Takes units of work from those that are left. Raises PatternError if too few are left."""
        self.left -= units
        if self.left < 0:
            raise PatternError("it takes too long to match")


def matches(node: Node, text: str, fuel: Fuel | None = None) -> bool:
    """Returns whether a pattern matches the whole text. Raises PatternError if matching takes too long."""
    return len(text) in _ends(node, text, frozenset({0}), fuel or Fuel())


def _ends(node: Node, text: str, starts: frozenset[int], fuel: Fuel) -> frozenset[int]:
    """Returns the positions where a match that begins at one of `starts` may end."""
    fuel.spend(1 + len(starts))
    match node:
        case Chars(ranges):
            inside = (at for at in starts if at < len(text))
            return frozenset(at + 1 for at in inside if any(low <= ord(text[at]) <= high for low, high in ranges))
        case Run(parts):
            for part in parts:
                starts = _ends(part, text, starts, fuel)
            return starts
        case Either(choices):
            return frozenset().union(*(_ends(choice, text, starts, fuel) for choice in choices))
        case Repeat(part, least, most):
            return _repeat_ends(part, least, most, text, starts, fuel)


def _repeat_ends(
    part: Node, least: int, most: int | None, text: str, starts: frozenset[int], fuel: Fuel
) -> frozenset[int]:
    for _ in range(least):
        starts = _ends(part, text, starts, fuel)
    found, newest, count = set(starts), starts, least
    while newest and (most is None or count < most):
        newest = _ends(part, text, newest, fuel) - found
        found |= newest
        count += 1
    return frozenset(found)


def is_universal(node: Node) -> bool:
    """Returns True if one part of a pattern matches any text and all other parts may be empty. Other patterns give
    False, even if they match every text.
    """
    match node:
        case Either(choices):
            return any(is_universal(choice) for choice in choices)
        case Run(parts):
            return ANYTHING in parts and matches(node, "")
        case _:
            return node == ANYTHING
