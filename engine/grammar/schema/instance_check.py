"""Checks given values against a schema, because the values of `enum` and `const` must also meet the other keywords."""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from graftwork.engine.grammar.patterns.matching import Fuel, matches
from graftwork.engine.grammar.patterns.nodes import PatternError
from graftwork.engine.grammar.schema.constraints import (
    Alternative,
    Among,
    Bound,
    Claim,
    ClaimSet,
    Contains,
    Demand,
    HasFormat,
    Items,
    Length,
    Matches,
    MultipleOf,
    Names,
    Presence,
    Properties,
    Property,
)
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.json_values import ARRAY, NUMBERS, OBJECT, STRING, identity, type_of
from graftwork.engine.grammar.schema.normalise import SchemaExpander

_FUEL = 1_000_000


class Fitting:
    """Checks given values against a schema, which is expanded into alternatives."""

    def __init__(self, expander: SchemaExpander, unenforced: UnenforcedKeywords) -> None:
        self._expander = expander
        self._unenforced = unenforced
        self._fuel = Fuel(_FUEL)

    def fits(self, value: Any, claim_set: ClaimSet) -> bool:
        return any(self.is_met(value, alternative) for alternative in self._expander.alternatives_of(claim_set, "#"))

    def is_met(self, value: Any, alternative: Alternative) -> bool:
        """Returns whether a value fits one alternative of a schema. Raises InvalidRequest if the check takes too
        long.
        """
        try:
            return type_of(value) in alternative.types and all(
                self._meets(value, demand) for demand in alternative.demands
            )
        except PatternError as error:
            raise refused(alternative.demands[0].pointer, f"whether a given value or name fits: {error}.") from None

    def _fits_claim(self, value: Any, claim: Claim | None) -> bool:
        return claim is None or self.fits(value, frozenset({claim}))

    def _meets(self, value: Any, demand: Demand) -> bool:
        """Returns whether a value meets a demand. A demand on another type is always met."""
        kind = type_of(value)
        match demand:
            case Among(values, holds):
                return (identity(value) in {identity(one) for one in values}) == holds
            case Bound() | MultipleOf():
                return kind not in NUMBERS or _number_meets(value, demand)
            case Length(of, least, most):
                return kind != of or (least <= len(value) and (most is None or len(value) <= most))
            case Matches(pattern):
                return kind != STRING or matches(pattern, value, self._fuel)
            case HasFormat():
                if kind == STRING:
                    self._unenforced.record(demand.pointer, "the format of a listed value cannot be checked.")
                return True
            case Items() | Contains():
                return kind != ARRAY or self._array_meets(value, demand)
            case _:
                return kind != OBJECT or self._object_meets(value, demand)

    def _array_meets(self, value: list[Any], demand: Items | Contains) -> bool:
        if isinstance(demand, Contains):
            count = sum(self._fits_claim(item, demand.claim) for item in value)
            return demand.least <= count and (demand.most is None or count <= demand.most)
        rest: Iterable[Any] = value[len(demand.first) :]
        return all(map(self._fits_claim, value, demand.first)) and all(
            self._fits_claim(item, demand.rest) for item in rest
        )

    def _object_meets(self, value: dict[str, Any], demand: Properties | Property | Presence | Names) -> bool:
        match demand:
            case Presence(name, required):
                return (name in value) == required
            case Property(name, claim):
                return name not in value or self._fits_claim(value[name], claim)
            case Names(claim):
                return all(self._fits_claim(name, claim) for name in value)
            case Properties():
                return all(self.fits(item, self.claims_on(demand, name)) for name, item in value.items())

    def claims_on(self, demand: Properties, name: str) -> ClaimSet:
        """Returns all claims that a demand on an object's properties makes on the property `name`.

        A claim says that a value fits, or does not fit, a subschema. Raises PatternError if matching the name takes too
        long.
        """
        claims = [demand.named[name]] if name in demand.named else []
        claims += [claim for pattern, claim in demand.patterns if matches(pattern, name, self._fuel)]
        return frozenset(claim for claim in claims or [demand.rest] if claim is not None)


def _number_meets(value: float, demand: Bound | MultipleOf) -> bool:
    if isinstance(demand, MultipleOf):
        return exact(value) % exact(demand.factor) == 0
    if demand.exclusive and value == demand.limit:
        return False
    return value >= demand.limit if demand.is_lower else value <= demand.limit


def exact(number: float) -> Fraction:
    """Returns a number as an exact fraction. A float stands for the decimal that was written: 0.1 becomes 1/10."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
