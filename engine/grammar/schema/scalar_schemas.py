"""Writes the number and string schemas of one alternative of a schema, with only the keywords that core_schema.py
lists.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from itertools import pairwise
from typing import Any

from graftwork.engine.grammar.patterns.nodes import none_of, written
from graftwork.engine.grammar.schema.constraints import Alternative, Bound, HasFormat, Length, Matches, MultipleOf
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords
from graftwork.engine.grammar.schema.instance_check import exact
from graftwork.engine.grammar.schema.json_values import FRACTION, INTEGER, NUMBERS, STRING, type_of

_MAX_FACTOR = 10_000
_MAX_BARRED = 16
_MAX_BARRED_LENGTH = 64
"""The longest forbidden text, in characters. Each character is a nested group, and engines limit the nesting."""
_STEP = 1e-6
_EXACT = 2**53
"""The largest number up to which each whole number is a different double."""
_DIGITS = 15
_LARGE = 10**9
_FARTHEST = 9 * 10**18
_LEAST_INTEGER = -(2**63 - 1024)
"""The least whole number that is a double and that llguidance still reads in 64 bits."""


def number_schemas(alternative: Alternative, barred: list[Any], unenforced: UnenforcedKeywords) -> list[dict[str, Any]]:
    """Returns the number schemas of one alternative of a schema.

    The schemas exclude the numbers in `barred`. These numbers cut the allowed range into several ranges, and each range
    gives one schema. If a number cannot be excluded, this is recorded in `unenforced`.

    The result is empty if the alternative allows only numbers that are not whole. No schema can express this.
    """
    if INTEGER not in alternative.types:
        return []
    is_whole = FRACTION not in alternative.types
    keywords: dict[str, Any] = {"type": "integer" if is_whole else "number"}
    keywords |= _bounds(alternative.of(Bound), unenforced, is_whole=is_whole)
    factors = alternative.of(MultipleOf)
    if factors and not _is_served(factors, keywords):
        unenforced.record(
            factors[0].pointer, f"multiples of one number up to {_MAX_FACTOR} can be enforced, not of others."
        )
    elif factors:
        keywords["multipleOf"] = factors[0].factor
    points = sorted(value for value in barred if type_of(value) in NUMBERS)
    if is_whole:
        points = [int(point) for point in points if type_of(point) == INTEGER]
    if len(points) > _MAX_BARRED or not all(_is_exact(point, is_whole=is_whole) for point in points):
        unenforced.record(
            alternative.demands[0].pointer, f"at most {_MAX_BARRED} numbers of few digits can be ruled out."
        )
        points = []
    runs = [_inside(run) for run in _split(keywords, points) if not _is_empty(run)]
    return [run for run in runs if not _is_empty(run)]


def _inside(keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords with open bounds moved inwards and closed, if a range of fractions is shorter than 1.

    llguidance 1.9.1 reads an open bound at a whole number as closed in such a range.
    """
    low, high = _limits(keywords)
    if keywords["type"] == "integer" or high - low >= 1:
        return keywords
    step = max(min(_STEP, (high - low) / 4), math.ulp(low), math.ulp(high))
    narrowed = dict(keywords)
    if narrowed.pop("exclusiveMinimum", None) is not None:
        narrowed["minimum"] = _rounded(low + step, up=True)
    if narrowed.pop("exclusiveMaximum", None) is not None:
        narrowed["maximum"] = _rounded(high - step, up=False)
    return narrowed


def _bounds(bounds: list[Bound], unenforced: UnenforcedKeywords, *, is_whole: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for is_lower, plain, exclusive in ((True, "minimum", "exclusiveMinimum"), (False, "maximum", "exclusiveMaximum")):
        ours = [one for one in bounds if one.is_lower == is_lower]
        if ours:
            tightest = max(ours, key=lambda one: (one.limit if one.is_lower else -one.limit, one.exclusive))
            limit = _whole_inward(tightest) if is_whole else _inward(tightest)
            if limit is None:
                unenforced.record(tightest.pointer, f"no number beyond {_FARTHEST} can be written.")
            else:
                found[exclusive if tightest.exclusive and limit == tightest.limit else plain] = limit
    return found


def _inward(bound: Bound) -> float | None:
    """Returns the nearest limit inside a bound that llguidance 1.9.1 reads exactly. None if no number meets the bound.

    llguidance keeps 15 digits. If the limit is a large number, llguidance allows the limit itself even if it is open.
    """
    limit = bound.limit
    if bound.exclusive and abs(limit) >= _LARGE:
        limit += math.copysign(abs(limit) / 10**_DIGITS, 1 if bound.is_lower else -1)
    inward = _rounded(limit, up=bound.is_lower)
    return inward if abs(inward) <= _FARTHEST else _beyond(bound, -_FARTHEST)


def _whole_inward(bound: Bound) -> float | None:
    """Returns the nearest whole number inside a bound that llguidance reads exactly: as a double and in 64 bits.

    None if no number meets the bound.
    """
    limit = (
        exact(bound.limit) if bound.is_lower else -exact(bound.limit)
    )  # an upper bound is a lower bound of the negated numbers
    least = math.floor(limit) + 1 if bound.exclusive else math.ceil(limit)
    double = float(least)
    inward = int(double if double >= least else math.nextafter(double, math.inf))
    if not _LEAST_INTEGER <= inward <= _FARTHEST:
        return _beyond(bound, _LEAST_INTEGER)
    return inward if bound.is_lower else -inward


def _beyond(bound: Bound, farthest: int) -> int | None:
    """Returns a limit that every number meets, for a bound beyond all numbers that can be written.

    None if no number meets the bound.
    """
    if (bound.limit > 0) == bound.is_lower:
        return None
    return farthest if bound.is_lower else -farthest


def _is_exact(point: float, *, is_whole: bool) -> bool:
    """Returns whether llguidance represents a number exactly, so that its neighbours are different numbers."""
    return abs(point) <= _EXACT if is_whole else abs(point) < _LARGE and _rounded(point, up=True) == point


def _rounded(limit: float, *, up: bool) -> float:
    """Rounds a limit up or down to the 15 digits that llguidance keeps."""
    if isinstance(limit, int) and abs(limit) < 10**_DIGITS:
        return limit
    return float(Context(_DIGITS, ROUND_CEILING if up else ROUND_FLOOR).create_decimal(repr(limit)))


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


def string_schemas(alternative: Alternative, barred: list[Any], unenforced: UnenforcedKeywords) -> list[dict[str, Any]]:
    """Returns a list with the string schema of one alternative of a schema.

    A string must match all patterns of the alternative. The schema excludes the strings in `barred`. What cannot be
    excluded is recorded in `unenforced`.
    """
    keywords: dict[str, Any] = {"type": STRING}
    lengths = [one for one in alternative.of(Length) if one.of == STRING]
    least = max((one.least for one in lengths), default=0)
    most = min((one.most for one in lengths if one.most is not None), default=None)
    keywords |= {"minLength": least} if least else {}
    keywords |= {"maxLength": most} if most is not None else {}
    nodes = [one.pattern for one in alternative.of(Matches)]
    texts = [value for value in barred if isinstance(value, str)]
    if max(map(len, texts), default=0) > _MAX_BARRED_LENGTH:
        unenforced.record(
            alternative.demands[0].pointer, f"texts up to {_MAX_BARRED_LENGTH} characters can be ruled out."
        )
        texts = []
    asked: list[dict[str, Any]] = [{"pattern": anchored(written(node))} for node in nodes]
    asked += [{"pattern": anchored(written(none_of(texts)))}] if texts else []
    asked += [{"format": name} for name in dict.fromkeys(one.format for one in alternative.of(HasFormat))]
    if len(asked) == 1:
        return [keywords | asked[0]]
    return [keywords | ({"allOf": asked} if asked else {})]


def anchored(pattern: str) -> str:
    """Returns the pattern with anchors at both ends, so that it must match the whole text."""
    return f"^(?:{pattern})$"
