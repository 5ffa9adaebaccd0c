"""Derives what follows from the demands of one alternative of a schema.

Removes the types whose values can never meet the demands. Finds the properties and items about which no keyword of the
alternative says anything, for `unevaluatedProperties` and `unevaluatedItems`.
"""

from typing import Any

from graftwork.engine.grammar.schema.constraints import (
    Alternative,
    Among,
    Bound,
    Claim,
    Items,
    Length,
    Presence,
    Properties,
)
from graftwork.engine.grammar.schema.json_values import ALL_TYPES, NUMBERS, OBJECT, identity, type_of


def required_names(alternative: Alternative) -> list[str]:
    return [demand.name for demand in alternative.of(Presence) if demand.required]


def narrowed(alternative: Alternative) -> Alternative | None:
    """Returns one alternative of a schema without the types whose values can never meet its demands.

    Returns None if no type is left: then no value fits the alternative.
    """
    types = set(alternative.types & _possible_types(alternative))
    lengths: dict[str, list[Length]] = {}
    for length in alternative.of(Length):
        lengths.setdefault(length.of, []).append(length)
    for of, demands in lengths.items():
        if max(one.least for one in demands) > min((one.most for one in demands if one.most is not None), default=1e99):
            types.discard(of)
    if {one.name for one in alternative.of(Presence) if not one.required} & set(required_names(alternative)):
        types.discard(OBJECT)
    if _bounds_cross(alternative.of(Bound)):
        types -= NUMBERS
    return Alternative(frozenset(types), alternative.demands) if types else None


def _possible_types(alternative: Alternative) -> frozenset[str]:
    """Returns the types of the values that an alternative lists. All types if it lists no values."""
    values = listed_values(alternative)
    return ALL_TYPES if values is None else frozenset(type_of(value) for value in values)


def listed_values(alternative: Alternative) -> list[Any] | None:
    """Returns the values that all keywords `enum` and `const` of one alternative of a schema allow.

    Returns None if the alternative has neither keyword.
    """
    among = alternative.of(Among)
    listed = [demand for demand in among if demand.holds]
    if not listed:
        return None
    barred = {identity(value) for demand in among if not demand.holds for value in demand.values}
    common = [{identity(value) for value in demand.values} for demand in listed[1:]]
    distinct = {identity(value): value for value in listed[0].values}
    return [value for key, value in distinct.items() if key not in barred and all(key in others for others in common)]


def _bounds_cross(bounds: list[Bound]) -> bool:
    lower = max(((one.limit, one.exclusive) for one in bounds if one.is_lower), default=None)
    upper = min(((one.limit, not one.exclusive) for one in bounds if not one.is_lower), default=None)
    if lower is None or upper is None:
        return False
    return lower[0] > upper[0] or (lower[0] == upper[0] and (lower[1] or not upper[1]))


def rest_of_properties(alternative: Alternative, rest: Claim) -> Properties:
    """Returns a demand: the claim `rest` holds for each property that no keyword of this alternative evaluates.

    A keyword evaluates a property if it applies to the property, as JSON Schema defines it for `unevaluatedProperties`.
    Keywords of other alternatives of a schema do not count.
    """
    seen = [demand for demand in alternative.of(Properties) if not demand.silent]
    everything = any(demand.rest is not None for demand in seen)
    return Properties(
        {name: None for demand in seen for name in demand.named},
        tuple((pattern, None) for demand in seen for pattern, _ in demand.patterns),
        None if everything else rest,
        rest.pointer,
        rest.silent,
    )


def rest_of_items(alternative: Alternative, rest: Claim) -> Items:
    """Returns a demand: the claim `rest` holds for each array item that no keyword of this alternative evaluates.

    A keyword evaluates an item if it applies to the item, as JSON Schema defines it for `unevaluatedItems`.
    """
    seen = [demand for demand in alternative.of(Items) if not demand.silent]
    everything = any(demand.rest is not None for demand in seen)
    most = max((len(demand.first) for demand in seen), default=0)
    return Items((None,) * most, None if everything else rest, rest.pointer, rest.silent)
