"""Defines the data types for what a schema demands of a value. Unions, negations and references are resolved before.

A claim says that a value fits, or does not fit, the subschema at one JSON pointer. A claim set is a set of claims that
must all hold. An alternative of a claim is a set of types and a list of demands. Most demands apply only to values of
one type. A value fits an alternative if its type is in this set, and if it meets every demand that applies to this
type. A value fits a claim if it fits one of the claim's alternatives.

This module holds only data. It reads no schema and checks no value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.grammar.patterns.nodes import Node


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """Says that a value fits the subschema at `pointer`. If `holds` is False, it says that the value does not fit."""

    pointer: str
    holds: bool = True
    silent: bool = False
    """Whether the claim stands under a negation. Then `unevaluated…` keywords outside the negation ignore what the
    claim evaluates.
    """

    def negated(self) -> "Claim":
        return Claim(self.pointer, not self.holds, True)


ClaimSet = frozenset[Claim]
"""A set of claims that must all hold. Every value meets the empty claim set."""


@dataclass(frozen=True, slots=True)
class Among:
    """Demands that a value of any type is one of `values`. If `holds` is False, it must be none of them."""

    values: tuple[Any, ...] = field(hash=False)
    holds: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Bound:
    """Demands that a number is at least `limit` if `is_lower`, and at most `limit` if not.

    If `exclusive`, the number must not equal the limit.
    """

    limit: float
    is_lower: bool
    exclusive: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class MultipleOf:
    factor: float
    pointer: str


@dataclass(frozen=True, slots=True)
class Length:
    """Demands that a value of type `of` has a length from `least` to `most`. A `most` of None sets no upper limit.

    The length of a string counts its characters, the length of an array its items, and that of an object its
    properties.
    """

    of: str
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Matches:
    """Demands that a pattern matches the whole of a string."""

    pattern: Node = field(hash=False)
    pointer: str


@dataclass(frozen=True, slots=True)
class HasFormat:
    """Demands that a string has a format: `format` is a value of the JSON Schema keyword `format`, such as "date"."""

    format: str
    pointer: str


@dataclass(frozen=True, slots=True)
class Items:
    """Demands that the items of an array meet claims (fit, or do not fit, a subschema).

    `first` has one claim for each of the first items, and `rest` is the claim for every later item. None demands
    nothing of these items.
    """

    first: tuple[Claim | None, ...]
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Contains:
    """Demands that at least `least` and at most `most` items of an array meet a claim (fit, or do not fit, a
    subschema).

    A `most` of None sets no upper limit.
    """

    claim: Claim
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Properties:
    """Demands that the properties of an object meet claims (fit, or do not fit, a subschema).

    `named` has the claims by property name, and `patterns` has those by pattern of the name. `rest` is the claim for
    every other property. A claim of None demands nothing.
    """

    named: Mapping[str, Claim | None] = field(hash=False)
    patterns: tuple[tuple[Node, Claim | None], ...] = field(hash=False)
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Property:
    """Demands that one property of an object meets a claim (fits, or does not fit, a subschema), if the property is
    present.
    """

    name: str
    claim: Claim
    pointer: str


@dataclass(frozen=True, slots=True)
class Presence:
    """Demands that an object has the property `name`. If `required` is False, the object must not have it."""

    name: str
    required: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Names:
    """Demands that the name of every property of an object meets a claim (fits, or does not fit, a subschema)."""

    claim: Claim
    pointer: str


Demand = (
    Among
    | Bound
    | MultipleOf
    | Length
    | Matches
    | HasFormat
    | Items
    | Contains
    | Properties
    | Property
    | Presence
    | Names
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative of a claim (a statement that a value fits a subschema): a set of types, and demands on values of
    these types.
    """

    types: frozenset[str]
    demands: tuple[Demand, ...] = ()

    def of(self, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        """Returns those demands of this alternative that are instances of `kind`, such as `Length`."""
        return [demand for demand in self.demands if isinstance(demand, kind)]
