"""Numbers and strings of one branch, in core keywords."""

import math
from itertools import pairwise
from typing import Any

from graftwork.engine.grammar.demands import Bound, Branch, HasFormat, Length, Matches, MultipleOf
from graftwork.engine.grammar.fitting import exact
from graftwork.engine.grammar.json_values import FRACTION, INTEGER, NUMBERS, STRING, type_of
from graftwork.engine.grammar.patterns import none_of, written
from graftwork.engine.grammar.refusal import Gaps

_MAX_FACTOR = 10_000
_MAX_BARRED = 16
_STEP = 1e-6


def number_schemas(branch: Branch, barred: list[Any], gaps: Gaps) -> list[dict[str, Any]]:
    """One for each run between the numbers that are barred. Numbers that must have a fraction cannot be said."""
    if INTEGER not in branch.types:
        return []
    keywords: dict[str, Any] = {"type": "number" if FRACTION in branch.types else "integer"}
    keywords |= _bounds(branch.of(Bound))
    factors = branch.of(MultipleOf)
    if factors and not _is_served(factors, keywords):
        gaps.meet(factors[0].pointer, f"multiples of one number up to {_MAX_FACTOR} can be enforced, not of others.")
    elif factors:
        keywords["multipleOf"] = factors[0].factor
    points = sorted(value for value in barred if type_of(value) in NUMBERS)
    if len(points) > _MAX_BARRED:
        gaps.meet(branch.demands[0].pointer, f"at most {_MAX_BARRED} numbers can be ruled out.")
        points = []
    return [_inside(run) for run in _split(keywords, points) if not _is_empty(run)]


def _inside(keywords: dict[str, Any]) -> dict[str, Any]:
    """Within one unit, llguidance 1.9.1 reads an open bound at a whole number as a closed one: step inside."""
    low, high = _limits(keywords)
    if keywords["type"] == "integer" or high - low >= 1:
        return keywords
    step = min(_STEP, (high - low) / 4)
    narrowed = dict(keywords)
    if narrowed.pop("exclusiveMinimum", None) is not None:
        narrowed["minimum"] = low + step
    if narrowed.pop("exclusiveMaximum", None) is not None:
        narrowed["maximum"] = high - step
    return narrowed


def _bounds(bounds: list[Bound]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for is_lower, plain, exclusive in ((True, "minimum", "exclusiveMinimum"), (False, "maximum", "exclusiveMaximum")):
        ours = [one for one in bounds if one.is_lower == is_lower]
        if ours:
            tightest = max(ours, key=lambda one: (one.limit if one.is_lower else -one.limit, one.exclusive))
            found[exclusive if tightest.exclusive else plain] = tightest.limit
    return found


def _is_served(factors: list[MultipleOf], keywords: dict[str, Any]) -> bool:
    distinct = {exact(one.factor) for one in factors}
    return len(distinct) == 1 and exact(factors[0].factor).numerator <= _MAX_FACTOR and (
        exact(factors[0].factor).denominator <= _MAX_FACTOR
    )  # fmt: skip


def _split(keywords: dict[str, Any], points: list[float]) -> list[dict[str, Any]]:
    low, high = _limits(keywords)
    inside = [point for point in points if low <= point <= high]
    edges: list[float | None] = [None, *inside, None]
    runs = []
    for left, right in pairwise(edges):
        run = dict(keywords)
        if left is not None:
            run.pop("minimum", None)
            run["exclusiveMinimum"] = left
        if right is not None:
            run.pop("maximum", None)
            run["exclusiveMaximum"] = right
        runs.append(run)
    return runs


def _limits(keywords: dict[str, Any]) -> tuple[float, float]:
    low = max(keywords.get("minimum", -math.inf), keywords.get("exclusiveMinimum", -math.inf))
    high = min(keywords.get("maximum", math.inf), keywords.get("exclusiveMaximum", math.inf))
    return low, high


def _is_empty(keywords: dict[str, Any]) -> bool:
    low, high = _limits(keywords)
    open_low, open_high = keywords.get("exclusiveMinimum") == low, keywords.get("exclusiveMaximum") == high
    if keywords["type"] == "integer" and math.isfinite(low) and math.isfinite(high):
        first = math.floor(low) + 1 if open_low else math.ceil(low)
        last = math.ceil(high) - 1 if open_high else math.floor(high)
        return first > last
    return low > high or (low == high and (open_low or open_high))


def string_schemas(branch: Branch, barred: list[Any]) -> list[dict[str, Any]]:
    """One schema; several patterns are all asked for."""
    keywords: dict[str, Any] = {"type": STRING}
    lengths = [one for one in branch.of(Length) if one.of == STRING]
    least = max((one.least for one in lengths), default=0)
    most = min((one.most for one in lengths if one.most is not None), default=None)
    keywords |= {"minLength": least} if least else {}
    keywords |= {"maxLength": most} if most is not None else {}
    nodes = [one.pattern for one in branch.of(Matches)]
    texts = [value for value in barred if isinstance(value, str)]
    asked: list[dict[str, Any]] = [{"pattern": anchored(written(node))} for node in nodes]
    asked += [{"pattern": anchored(written(none_of(texts)))}] if texts else []
    asked += [{"format": name} for name in dict.fromkeys(one.format for one in branch.of(HasFormat))]
    if len(asked) == 1:
        return [keywords | asked[0]]
    return [keywords | ({"allOf": asked} if asked else {})]


def anchored(pattern: str) -> str:
    """A pattern that says itself where it is open."""
    return f"^(?:{pattern})$"
