"""Expands a schema into alternatives, in which no union, negation, condition or reference is left.

A value fits the schema if it fits one of the alternatives. Every keyword is read in two ways: that it holds, and that
it does not. Negation swaps the two readings (De Morgan). So the grammar engines never see `not`, `if`/`then`/`else` or
`oneOf`. A keyword whose negation cannot be expressed (such as "some item does not fit") is not enforced, which is
recorded.

Alternatives that contradict themselves are dropped.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from graftwork.engine.grammar.schema.constraints import (
    Alternative,
    Among,
    Claim,
    ClaimSet,
    Presence,
    Properties,
    Property,
)
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.json_values import ALL_TYPES, OBJECT
from graftwork.engine.grammar.schema.keywords import ANYTHING, LEAF_KEYWORDS, NOTHING, LeafKeywords
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.narrowing import narrowed, required_names, rest_of_items, rest_of_properties
from graftwork.engine.grammar.schema.part_keywords import PartKeywords
from graftwork.engine.grammar.schema.schema_document import Dialect, SchemaDocument, under

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_WORK = 40_000
_WORTH = 16
"""The number of demands and listed values that cost one unit of work when two alternatives are joined. Each join
costs one more unit.
"""
_LOOK_AHEAD = 2
_MOST_SUBSETS = 4


class _Loop(Exception):
    """Raised when a claim refers to itself while it is expanded."""


class SchemaExpander:
    """Expands claims into alternatives. A claim says that a value fits a subschema, or does not; an alternative is a
    set of types and demands, one of several by which the claim holds.

    Remembers the alternatives of each claim, and counts its own work. Raises InvalidRequest if the work exceeds the
    limit.
    """

    def __init__(self, document: SchemaDocument, limits: LintLimits, unenforced: UnenforcedKeywords) -> None:
        self._document = document
        self._limits = limits
        self._unenforced = unenforced
        self._leaves = LeafKeywords(limits, unenforced)
        self.parts = PartKeywords(self.alternatives, self._leaves, unenforced)
        self._known: dict[Claim, list[Alternative]] = {}
        self._open: set[Claim] = set()
        self._work = 0

    # ---- claim sets ------------------------------------------------------------------------------------------------

    def alternatives_of(self, claim_set: ClaimSet, pointer: str) -> list[Alternative]:
        """Returns the ways in which a value can meet `claim_set`, a set of claims that must all hold.

        Each result is one alternative: a set of types, and demands on values of these types.

        A claim says that a value fits a subschema, or does not. Raises InvalidRequest, which names `pointer`, if there
        are too many alternatives.
        """
        try:
            return self._product([self.alternatives(claim) for claim in sorted(claim_set)], pointer)
        except _Loop:
            self._unenforced.record(pointer, "it refers to itself without anything between.")
            return ANYTHING

    def is_possible(self, claim_set: ClaimSet, depth: int = 0) -> bool:
        """Returns False if it is certain that no value meets a claim set.

        A claim set is a set of claims. A claim says that a value fits a subschema, or does not. If the result is True,
        a value may still not exist, because only a few levels of required properties are examined.
        """
        try:
            alternatives = self._product([self.alternatives(claim) for claim in sorted(claim_set)], "#")
        except _Loop:
            return True
        return depth >= _LOOK_AHEAD or any(self._has_types(alternative, depth + 1) for alternative in alternatives)

    def _has_types(self, alternative: Alternative, depth: int) -> bool:
        return alternative.types != {OBJECT} or self._object_is_possible(alternative, depth)

    def _object_is_possible(self, alternative: Alternative, depth: int) -> bool:
        return all(
            self.is_possible(claim_set, depth)
            for name in required_names(alternative)
            if (claim_set := self.property_claims(alternative, name)) is not None
        )

    def property_claims(self, alternative: Alternative, name: str) -> ClaimSet:
        """Returns the claims that one alternative of a schema makes on the value of the property `name`.

        A claim says that a value fits a subschema, or does not. Claims that a pattern of names makes are left out.
        """
        claims: set[Claim] = {demand.claim for demand in alternative.of(Property) if demand.name == name}
        for demand in alternative.of(Properties):
            claims |= set(_claims_on(demand, name))
        return frozenset(claims)

    # ---- claims -----------------------------------------------------------------------------------------------

    def alternatives(self, claim: Claim) -> list[Alternative]:
        """Returns the alternatives of a claim: the ways in which a value can meet it. Caches them.

        A claim says that a value fits a subschema, or does not. Raises `_Loop` if the claim refers to itself.
        """
        if claim not in self._known:
            if claim in self._open:
                raise _Loop
            self._open.add(claim)
            try:
                self._known[claim] = self._expand(claim)
            finally:
                self._open.discard(claim)
        return self._known[claim]

    def _expand(self, claim: Claim) -> list[Alternative]:
        place = self._document.place(claim.pointer)
        if isinstance(place.schema, bool):
            return ANYTHING if place.schema == claim.holds else NOTHING
        schema = place.schema
        if place.dialect <= Dialect.DRAFT7 and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        parts = [read(self, schema, claim) for keywords, read in _GROUPS if any(word in schema for word in keywords)]
        parts += [
            self._leaves.alternatives(word, schema, claim.pointer, claim.holds)
            for word in LEAF_KEYWORDS
            if word in schema
        ]
        if not claim.holds:
            found = [alternative for part in parts for alternative in part]
            if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
                found = self.parts.not_enforced(claim.pointer, "unevaluated parts under a negation cannot be enforced.")
            return self._checked(found, claim.pointer)
        return self._with_unevaluated(schema, claim, self._product(parts, claim.pointer))

    def _product(self, parts: Sequence[list[Alternative]], pointer: str) -> list[Alternative]:
        """Combines one alternative of each list in `parts`, in every way. Drops combinations that contradict
        themselves.
        """
        found = ANYTHING
        for part in sorted(parts, key=len):
            if part is ANYTHING:
                continue
            found = self._checked(
                [one for left in found for right in part if (one := self._both(left, right))], pointer
            )
        return found

    def _checked(self, found: list[Alternative], pointer: str) -> list[Alternative]:
        if len(found) > self._limits.alternatives:
            raise refused(pointer, f"it multiplies out to more than {self._limits.alternatives} alternatives.")
        return found

    def _both(self, left: Alternative, right: Alternative) -> Alternative | None:
        demands = tuple(dict.fromkeys((*left.demands, *right.demands)))
        self._work += 1 + sum(len(one.values) if isinstance(one, Among) else 1 for one in demands) // _WORTH
        if self._work > _WORK:
            raise refused("#", "its unions and conditions multiply out to too much; write it more plainly.")
        return narrowed(Alternative(left.types & right.types, demands))

    # ---- other schemas at the same place ----------------------------------------------------------------------

    def _reference(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        parts = [
            self.alternatives(Claim(self._document.target(claim.pointer, keyword), claim.holds, claim.silent))
            for keyword in _REFERENCES
            if keyword in schema
        ]
        if claim.holds:
            return self._product(parts, claim.pointer)
        return [alternative for part in parts for alternative in part]

    def _children(self, schema: dict[str, Any], claim: Claim, keyword: str) -> list[Claim]:
        value, at = schema[keyword], under(claim.pointer, keyword)
        if not isinstance(value, list) or not value:
            raise refused(at, f"{keyword} is a list of schemas.")
        if len(value) > self._limits.union_width:
            raise refused(at, f"it has {len(value)} parts; at most {self._limits.union_width} are served.")
        return [Claim(under(at, index), claim.holds, claim.silent) for index in range(len(value))]

    def _all_of(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        parts = [self.alternatives(child) for child in self._children(schema, claim, "allOf")]
        return (
            self._product(parts, claim.pointer)
            if claim.holds
            else [alternative for part in parts for alternative in part]
        )

    def _any_of(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        children = self._children(schema, claim, "anyOf")
        parts = [self.alternatives(child) for child in children]
        if not claim.holds:
            return self._product(parts, claim.pointer)
        if len(children) <= _MOST_SUBSETS and self._evaluates(claim):
            # Every fitting alternative counts, because unevaluated parts depend on which ones fit.
            sizes = range(len(parts), 0, -1)
            subsets = [subset for size in sizes for subset in combinations(parts, size)]
            return [alternative for subset in subsets for alternative in self._product(subset, claim.pointer)]
        return self._checked([alternative for part in parts for alternative in part], claim.pointer)

    def _evaluates(self, claim: Claim) -> bool:
        return not claim.silent and self._document.has_unevaluated

    def _one_of(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        children = self._children(schema, claim, "oneOf")
        at = under(claim.pointer, "oneOf")
        if not claim.holds:
            if len(children) > _MOST_SUBSETS:
                return self.parts.not_enforced(at, "not exactly one of many cannot be enforced.")
            return self._not_one_of(children, at)
        found: list[Alternative] = []
        for child in children:
            others = [other for other in children if other != child and not self._are_apart(child, other)]
            found += self._product(
                [self.alternatives(child), *(self.alternatives(one.negated()) for one in others)], at
            )
        return self._checked(found, at)

    def _not_one_of(self, children: list[Claim], at: str) -> list[Alternative]:
        yes = [Claim(child.pointer, True, True) for child in children]
        none = self._product([self.alternatives(child) for child in children], at)
        pairs = [
            self._product([self.alternatives(one), self.alternatives(two)], at) for one, two in combinations(yes, 2)
        ]
        return none + [alternative for pair in pairs for alternative in pair]

    def _are_apart(self, one: Claim, two: Claim) -> bool:
        """Returns True if types, values or required properties show that no value fits both claims."""
        return not any(
            self._has_types(both, 0)
            for left in self.alternatives(one)
            for right in self.alternatives(two)
            if (both := self._both(left, right))
        )

    def _not(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        return self.alternatives(Claim(under(claim.pointer, "not"), not claim.holds, True))

    def _condition(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        if "if" not in schema or not ({"then", "else"} & schema.keys()):
            return ANYTHING if claim.holds else NOTHING
        found: list[Alternative] = []
        for keyword, is_met in (("then", True), ("else", False)):
            condition = Claim(under(claim.pointer, "if"), is_met, claim.silent or not is_met)
            if keyword in schema:
                follows = self.alternatives(Claim(under(claim.pointer, keyword), claim.holds, claim.silent))
            else:
                follows = ANYTHING if claim.holds else NOTHING
            found += self._product([self.alternatives(condition), follows], claim.pointer)
        return self._checked(found, claim.pointer)

    def _dependencies(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        parts: list[list[Alternative]] = []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            at = under(claim.pointer, keyword)
            if not isinstance(schema.get(keyword, {}), dict):
                raise refused(at, f"{keyword} is an object.")
            for name, value in schema.get(keyword, {}).items():
                parts.append(self._dependency(name, value, under(at, name), claim))
        return (
            self._product(parts, claim.pointer)
            if claim.holds
            else [alternative for part in parts for alternative in part]
        )

    def _dependency(self, name: str, value: Any, at: str, claim: Claim) -> list[Alternative]:
        there = Alternative(frozenset({OBJECT}), (Presence(name, True, at),))
        if at in self._document:
            follows = self.alternatives(Claim(at, claim.holds, claim.silent))
        elif not isinstance(value, list) or not all(isinstance(other, str) for other in value):
            raise refused(at, "what a property asks for is a list of names, or a schema where the keyword takes one.")
        elif claim.holds:
            follows = [Alternative(ALL_TYPES, tuple(Presence(other, True, at) for other in value))]
        else:
            follows = [Alternative(ALL_TYPES, (Presence(other, False, at),)) for other in value]
        found = self._product([[there], follows], at)
        return [Alternative(ALL_TYPES, (Presence(name, False, at),)), *found] if claim.holds else found

    # ---- unevaluated parts ------------------------------------------------------------------------------------

    def _with_unevaluated(self, schema: dict[str, Any], claim: Claim, found: list[Alternative]) -> list[Alternative]:
        for keyword, add in (("unevaluatedProperties", rest_of_properties), ("unevaluatedItems", rest_of_items)):
            if keyword in schema:
                rest = Claim(under(claim.pointer, keyword), True, claim.silent)
                found = [
                    Alternative(alternative.types, (*alternative.demands, add(alternative, rest)))
                    for alternative in found
                ]
        return found


def _claims_on(demand: Properties, name: str) -> list[Claim]:
    """Returns the claims that a demand makes on property `name`, without claims by pattern, because matching takes
    time.

    So the result may demand less than the schema, but never more.
    """
    found = demand.named.get(name) if name in demand.named or demand.patterns else demand.rest
    return [] if found is None else [found]


_Reading = Callable[[SchemaExpander, dict[str, Any], Claim], list[Alternative]]


def _of_parts(read: Callable[[PartKeywords, dict[str, Any], Claim], list[Alternative]]) -> _Reading:
    return lambda expander, schema, claim: read(expander.parts, schema, claim)


_GROUPS: tuple[tuple[tuple[str, ...], _Reading], ...] = (
    (("properties", "patternProperties", "additionalProperties"), _of_parts(PartKeywords.properties)),
    (_REFERENCES, SchemaExpander._reference),
    (("allOf",), SchemaExpander._all_of),
    (("anyOf",), SchemaExpander._any_of),
    (("oneOf",), SchemaExpander._one_of),
    (("not",), SchemaExpander._not),
    (("if", "then", "else"), SchemaExpander._condition),
    (("dependentRequired", "dependentSchemas", "dependencies"), SchemaExpander._dependencies),
    (("propertyNames",), _of_parts(PartKeywords.names)),
    (("prefixItems", "items", "additionalItems"), _of_parts(PartKeywords.items)),
    (("contains", "minContains", "maxContains"), _of_parts(PartKeywords.contains)),
)
