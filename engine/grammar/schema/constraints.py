"""The data types for what a schema demands of a value, after unions, negations and references are resolved.

A claim says that a value fits, or does not fit, the schema at one place. A goal is several claims that must all hold. A
branch is a set of types with demands. A value fits a branch if the branch has its type and the value meets every demand
on that type. A claim is the union of its branches. This module is only data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.grammar.schema.patterns import Node


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """Demands that the value fits the schema at `pointer`; if `holds` is False, that it does not fit."""

    pointer: str
    holds: bool = True
    silent: bool = False
    """True under a negation. Then `unevaluated…` keywords outside do not see what the claim evaluates."""

    def negated(self) -> "Claim":
        return Claim(self.pointer, not self.holds, True)


Goal = frozenset[Claim]
"""Claims that must all hold. Every value meets the empty goal."""


@dataclass(frozen=True, slots=True)
class Among:
    """For any type: the value is one of these values, or none of them."""

    values: tuple[Any, ...] = field(hash=False)
    holds: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Bound:
    """For a number: a lower or an upper limit."""

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
    """The length of a string in characters, of an array in items, or of an object in properties."""

    of: str
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Matches:
    """For a string: a pattern is found in it."""

    pattern: Node = field(hash=False)
    pointer: str


@dataclass(frozen=True, slots=True)
class HasFormat:
    """For a string: it has a format."""

    format: str
    pointer: str


@dataclass(frozen=True, slots=True)
class Items:
    """For an array: the claim that each of its first items must meet, and the claim for all others. None: no demand."""

    first: tuple[Claim | None, ...]
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Contains:
    """For an array: the number of items that fit a claim."""

    claim: Claim
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Properties:
    """For an object: claims on the named properties, on those that match a pattern, and on all others.

    None stands for no demand.
    """

    named: Mapping[str, Claim | None] = field(hash=False)
    patterns: tuple[tuple[Node, Claim | None], ...] = field(hash=False)
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Property:
    """For an object: a claim on one property, if the property is present."""

    name: str
    claim: Claim
    pointer: str


@dataclass(frozen=True, slots=True)
class Presence:
    """For an object: a property is present, or absent."""

    name: str
    required: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Names:
    """For an object: every property's name fits a claim."""

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
    """One alternative of a claim: types, and demands on them."""

    types: frozenset[str]
    demands: tuple[Demand, ...] = ()

    def of(self, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        """Returns the branch's demands that are of one class."""
        return [demand for demand in self.demands if isinstance(demand, kind)]
