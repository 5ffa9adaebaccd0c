"""What a schema asks of one value, once unions, negations and references are resolved: a branch of plain demands.

A claim says that a value does, or does not, fit the schema at a place; a goal is several claims at once. A branch is
a set of types and the demands on each; a value fits it if its type is among them and it meets every demand that
speaks of its type. A claim is the union of its branches. All of this is data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.grammar.schema.patterns import Node


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """The value fits the schema at `pointer`, or does not."""

    pointer: str
    holds: bool = True
    silent: bool = False
    """Under a negation: what it evaluates is not reported to `unevaluated…` outside."""

    def negated(self) -> "Claim":
        return Claim(self.pointer, not self.holds, True)


Goal = frozenset[Claim]
"""All at once; the empty goal is any value."""


@dataclass(frozen=True, slots=True)
class Among:
    """Any type: it is one of these values, or none of them."""

    values: tuple[Any, ...] = field(hash=False)
    holds: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Bound:
    """A number: at least or at most a limit."""

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
    """Of a string in characters, of an array in items, or of an object in properties."""

    of: str
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Matches:
    """A string: a pattern is found in it."""

    pattern: Node = field(hash=False)
    pointer: str


@dataclass(frozen=True, slots=True)
class HasFormat:
    """A string."""

    format: str
    pointer: str


@dataclass(frozen=True, slots=True)
class Items:
    """An array: its first items, then all the others; None asks nothing."""

    first: tuple[Claim | None, ...]
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Contains:
    """An array: so many items fit."""

    claim: Claim
    least: int
    most: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Properties:
    """An object: the properties named, those whose names match a pattern, and all the others; None asks nothing."""

    named: Mapping[str, Claim | None] = field(hash=False)
    patterns: tuple[tuple[Node, Claim | None], ...] = field(hash=False)
    rest: Claim | None
    pointer: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Property:
    """An object: one property, where it is there."""

    name: str
    claim: Claim
    pointer: str


@dataclass(frozen=True, slots=True)
class Presence:
    """An object has a property, or has it not."""

    name: str
    required: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Names:
    """An object: every property's name fits."""

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
    """One way to fit."""

    types: frozenset[str]
    demands: tuple[Demand, ...] = ()

    def of(self, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        """The demands of one kind."""
        return [demand for demand in self.demands if isinstance(demand, kind)]
