"""Drops from a branch the types that its own demands rule out; a branch without types is no way to fit at all."""

from collections.abc import Iterable

from graftwork.engine.grammar.demands import Among, Bound, Branch, Length, Presence
from graftwork.engine.grammar.json_values import ALL_TYPES, NUMBERS, OBJECT, identity, type_of


def required_names(branch: Branch) -> list[str]:
    return [demand.name for demand in branch.of(Presence) if demand.required]


def narrowed(branch: Branch) -> Branch | None:
    """Without the types that its demands rule out; None if none is left."""
    types = set(branch.types) & _possible_types(branch)
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


def _possible_types(branch: Branch) -> Iterable[str]:
    """Of the values that it allows, where it lists them."""
    among = branch.of(Among)
    listed = [demand for demand in among if demand.holds]
    if not listed:
        return ALL_TYPES
    barred = {identity(value) for demand in among if not demand.holds for value in demand.values}
    common = [{identity(value) for value in demand.values} for demand in listed]
    values = [value for value in listed[0].values if all(identity(value) in one for one in common)]
    return {type_of(value) for value in values if identity(value) not in barred}


def _bounds_cross(bounds: list[Bound]) -> bool:
    lower = max(((one.limit, one.exclusive) for one in bounds if one.is_lower), default=None)
    upper = min(((one.limit, not one.exclusive) for one in bounds if not one.is_lower), default=None)
    if lower is None or upper is None:
        return False
    return lower[0] > upper[0] or (lower[0] == upper[0] and (lower[1] or not upper[1]))
