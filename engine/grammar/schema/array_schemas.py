"""Writes the array schemas of one alternative of a schema, with only the keywords that core_schema.py lists."""

from collections.abc import Iterator
from typing import Any

from graftwork.engine.grammar.schema.constraints import Alternative, Claim, ClaimSet, Contains, Items, Length
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords
from graftwork.engine.grammar.schema.json_values import ARRAY

_PLACES = 4
"""The number of positions at which the items that fit `contains` may begin: 0 to 3. They must not begin later."""
_MOST_CONTAINED = 16

Written = tuple[dict[str, Any], tuple[ClaimSet, ...]]


def array_schemas(alternative: Alternative, barred: list[Any], unenforced: UnenforcedKeywords) -> list[Written]:
    """Returns the array schemas of one alternative of a schema.

    An alternative without the keyword `contains` has one array schema. With `contains` there are several, at least one
    for each position at which the items that fit `contains` may begin. These items are assumed to be adjacent.

    Each result is a pair (keywords, claim sets). A claim set is a set of claims. A claim says that a value fits a
    subschema, or does not. If no value can meet one of these claim sets, no array fits the schema.

    The schemas exclude the arrays in `barred`. If an array cannot be excluded, this is recorded in `unenforced`.
    """
    lengths = [one for one in alternative.of(Length) if one.of == ARRAY]
    least = max((one.least for one in lengths), default=0)
    most = min((one.most for one in lengths if one.most is not None), default=None)
    for value in barred:
        if value == []:
            least = max(least, 1)
        elif isinstance(value, list):
            unenforced.record(alternative.demands[0].pointer, "that an array is not a given one cannot be enforced.")
    first, rest = _items(alternative.of(Items))
    contains = alternative.of(Contains)
    if len(contains) > 1 or any(one.least > _MOST_CONTAINED for one in contains):
        unenforced.record(contains[0].pointer, f"one `contains`, of at most {_MOST_CONTAINED} items, can be enforced.")
        contains = []
    if not contains:
        return _written(first, rest, least, most)
    return [
        one
        for variant in _containing(contains[0], first, rest)
        for one in _written(*variant[:2], max(least, variant[2]), most)
    ]


def _items(demands: list[Items]) -> tuple[list[ClaimSet], ClaimSet]:
    count = max((len(one.first) for one in demands), default=0)
    first = [_goal(_at(one, index) for one in demands) for index in range(count)]
    return first, _goal(one.rest for one in demands)


def _at(demand: Items, index: int) -> Claim | None:
    return demand.first[index] if index < len(demand.first) else demand.rest


def _goal(claims: Iterator[Claim | None]) -> ClaimSet:
    return frozenset(claim for claim in claims if claim is not None)


def _containing(
    demand: Contains, first: list[ClaimSet], rest: ClaimSet
) -> Iterator[tuple[list[ClaimSet], ClaimSet, int]]:
    """Yields one result for each position at which the items that fit `contains` may begin; these items are adjacent.

    A result is the claim sets of the first items, the claim set of all other items, and the least length of the array.
    With `maxContains`, all other items must not fit, and each number of fitting items has its own results.
    """
    others: ClaimSet = frozenset() if demand.most is None else frozenset({demand.claim.negated()})
    last = demand.least if demand.most is None else min(demand.most, demand.least + _PLACES)
    for count in range(demand.least, last + 1):
        for place in range(_PLACES if count else 1):
            run = [others] * place + [frozenset({demand.claim})] * count
            length = max(len(run), len(first))
            wanted = [
                (first[index] if index < len(first) else rest) | (run[index] if index < len(run) else others)
                for index in range(length)
            ]
            yield wanted, rest | others, place + count


def _written(first: list[ClaimSet], rest: ClaimSet, least: int, most: int | None) -> list[Written]:
    if most is not None:
        first = first[:most]
        if least > most:
            return []
    keywords: dict[str, Any] = {"type": ARRAY}
    keywords |= {"prefixItems": first} if first else {}
    keywords |= {"items": rest} if rest else {}
    keywords |= {"minItems": least} if least else {}
    keywords |= {"maxItems": most} if most is not None else {}
    needs = [first[index] if index < len(first) else rest for index in range(min(least, len(first) + 1))]
    return [(keywords, tuple(dict.fromkeys(needs)))]
