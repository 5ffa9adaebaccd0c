"""Derives what follows from the demands of a branch (one alternative of a schema).

Removes the types whose values can never meet the demands. Finds the properties and items about which no keyword of the
branch says anything, for `unevaluatedProperties` and `unevaluatedItems`.
"""

from typing import Any

from graftwork.engine.grammar.schema.constraints import Among, Bound, Branch, Claim, Items, Length, Presence, Properties
from graftwork.engine.grammar.schema.json_values import ALL_TYPES, NUMBERS, OBJECT, identity, type_of


def required_names(branch: Branch) -> list[str]:
    return [demand.name for demand in branch.of(Presence) if demand.required]


def narrowed(branch: Branch) -> Branch | None:
    """Returns a branch (alternative of a schema) without the types whose values can never meet its demands.

    Returns None if no type is left: then no value fits the branch.
    """
    types = set(branch.types & _possible_types(branch))
    lengths: dict[str, list[Length]] = {}
    for length in branch.of(Length):
        lengths.setdefault(length.of, []).append(length)
    for of, demands in lengths.items():
        if max(one.least for one in demands) > min((one.most for one in demands if one.most is not None), default=1e99):
            types.discard(of)
    if {one.name for one in branch.of(Presence) if not one.required} & set(required_names(branch)):
        types.discard(OBJECT)
    if _bounds_cross(branch.of(Bound)):
        types -= NUMBERS
    return Branch(frozenset(types), branch.demands) if types else None


def _possible_types(branch: Branch) -> frozenset[str]:
    """Returns the types of the values that a branch lists. All types if it lists no values."""
    values = listed_values(branch)
    return ALL_TYPES if values is None else frozenset(type_of(value) for value in values)


def listed_values(branch: Branch) -> list[Any] | None:
    """Returns the values that all keywords `enum` and `const` of a branch (one alternative of a schema) allow.

    Returns None if the branch has neither keyword.
    """
    among = branch.of(Among)
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


def rest_of_properties(branch: Branch, rest: Claim) -> Properties:
    """Returns a demand: the claim `rest` holds for each property that no keyword of this branch evaluates.

    A keyword evaluates a property if it applies to the property, as JSON Schema defines it for `unevaluatedProperties`.
    Keywords of other branches (alternatives of a schema) do not count.
    """
    seen = [demand for demand in branch.of(Properties) if not demand.silent]
    everything = any(demand.rest is not None for demand in seen)
    return Properties(
        {name: None for demand in seen for name in demand.named},
        tuple((pattern, None) for demand in seen for pattern, _ in demand.patterns),
        None if everything else rest,
        rest.pointer,
        rest.silent,
    )


def rest_of_items(branch: Branch, rest: Claim) -> Items:
    """Returns a demand: the claim `rest` holds for each array item that no keyword of this branch evaluates.

    A keyword evaluates an item if it applies to the item, as JSON Schema defines it for `unevaluatedItems`.
    """
    seen = [demand for demand in branch.of(Items) if not demand.silent]
    everything = any(demand.rest is not None for demand in seen)
    most = max((len(demand.first) for demand in seen), default=0)
    return Items((None,) * most, None if everything else rest, rest.pointer, rest.silent)
