"""Defines the data types for what a schema demands of a value. Unions, negations and references are resolved before.

A claim says that a value fits, or does not fit, the subschema at one JSON pointer. A goal is a set of claims that must
all hold. A branch is one alternative of a claim: a set of types, and demands on values of these types. A value fits a
branch if the branch has its type and the value meets every demand on that type. A value fits a claim if it fits one of
the claim's branches.

This module holds only data. It reads no schema and checks no value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.grammar.schema.patterns import Node


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """Says that a value fits the subschema at `pointer`. If `holds` is False, it says that the value does not fit."""

    pointer: str
    holds: bool = True
    silent: bool = False
    """Whether the claim stands under a negation. Then `unevaluated…` keywords outside ignore what the claim evaluates.
    """

    def negated(self) -> "Claim":
        return Claim(self.pointer, not self.holds, True)


Goal = frozenset[Claim]
"""A set of claims that must all hold. Every value meets the empty goal."""


@dataclass(frozen=True, slots=True)
class Among:
    """Demands that a value of any type is one of `values`. If `holds` is False, it must be none of them."""

    values: tuple[Any, ...] = field(hash=False)
    holds: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Bound:
    """Demands that a number is not below `limit`, or not above it.

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
    """Demands a length from `least` to `most`; `most` is None without an upper limit. `of` is the type of the value.

    The length of a string counts characters, of an array items, and of an object properties.
    """

    of: str
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Matches:
    """Demands that the whole of a string matches a pattern."""

    pattern: Node = field(hash=False)
    pointer: str


@dataclass(frozen=True, slots=True)
class HasFormat:
    """Demands that a string has a format."""

    format: str
    pointer: str


@dataclass(frozen=True, slots=True)
class Items:
    """Demands that the items of an array meet claims: one claim for each of the first items, and `rest` for all others.
    None demands nothing.
    """

    first: tuple[Claim | None, ...]
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Contains:
    """Demands that `least` to `most` items of an array fit a claim. `most` is None without an upper limit."""

    claim: Claim
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Properties:
    """Demands that the properties of an object meet claims: those in `named`, those that match a pattern, and all
    others.

    None demands nothing.
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
    """Demands that a property of an object is present, or absent if `required` is False."""

    name: str
    required: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Names:
    """Demands that the name of every property of an object fits a claim."""

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
class Branch:
    """One alternative of a claim: a set of types, and demands on values of these types."""

    types: frozenset[str]
    demands: tuple[Demand, ...] = ()

    def of(self, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        """Returns the branch's demands that are of one class."""
        return [demand for demand in self.demands if isinstance(demand, kind)]
