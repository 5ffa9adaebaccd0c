"""Writes the object schemas of one alternative of a schema, with only the keywords that core_schema.py lists."""

from collections.abc import Iterable, Mapping
from typing import Any

from graftwork.engine.grammar.patterns.matching import is_universal
from graftwork.engine.grammar.patterns.nodes import Node, PatternError, length_between, written
from graftwork.engine.grammar.schema.constraints import (
    Alternative,
    Among,
    Claim,
    ClaimSet,
    HasFormat,
    Length,
    Matches,
    Names,
    Presence,
    Properties,
    Property,
)
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.instance_check import Fitting
from graftwork.engine.grammar.schema.json_values import OBJECT, STRING, is_writable
from graftwork.engine.grammar.schema.narrowing import required_names
from graftwork.engine.grammar.schema.normalise import SchemaExpander
from graftwork.engine.grammar.schema.scalar_schemas import anchored

Written = tuple[dict[str, Any], tuple[ClaimSet, ...]]


def object_schemas(
    alternative: Alternative,
    barred: list[Any],
    expander: SchemaExpander,
    fitting: Fitting,
    unenforced: UnenforcedKeywords,
) -> list[Written]:
    """Returns a list with the one object schema of one alternative of a schema.

    The list is empty if a required property can have no value. Otherwise it has one pair (keywords, claim sets). A
    claim set is a set of claims. A claim says that a value fits a subschema, or does not. If no value can meet one of
    these claim sets, no object fits the schema.

    The schema excludes the objects in `barred`. If an object cannot be excluded, this is recorded in `unenforced`.
    """
    try:
        return _ObjectWriter(alternative, barred, expander, fitting, unenforced).written()
    except PatternError as error:
        raise refused(alternative.demands[0].pointer, f"a property's name {error}.") from None


class _ObjectWriter:
    """Writes the object schema of one alternative."""

    def __init__(
        self,
        alternative: Alternative,
        barred: list[Any],
        expander: SchemaExpander,
        fitting: Fitting,
        unenforced: UnenforcedKeywords,
    ) -> None:
        self._branch = alternative
        self._barred = barred
        self._expander = expander
        self._fitting = fitting
        self._unenforced = unenforced
        self._shapes: list[Properties] = alternative.of(Properties)
        self._names: list[Names] = alternative.of(Names)
        self._forbidden = {one.name for one in alternative.of(Presence) if not one.required}
        self._required = list(dict.fromkeys(required_names(alternative)))
        self._asked: dict[str, set[Claim]] = {}
        for one in alternative.of(Property):
            self._asked.setdefault(one.name, set()).add(one.claim)

    def written(self) -> list[Written]:
        patterns, rest, named_only = self._unnamed()
        names = self._all_names(named_only)
        claim_sets = {name: self._goal(name) for name in names if self._is_allowed(name)}
        if not set(self._required) <= claim_sets.keys():
            return []
        properties: dict[str, Any] = {name: claim_sets.get(name, False) for name in names if is_writable(name)}
        keywords: dict[str, Any] = {"type": OBJECT}
        keywords |= {"properties": properties} if properties else {}
        keywords |= {"required": self._required} if self._required else {}
        keywords |= {"patternProperties": patterns} if patterns else {}
        keywords |= {"additionalProperties": rest} if rest != frozenset() else {}
        is_closed = rest is False and not patterns
        counts = self._counts(is_closed, len(claim_sets), has_optional=bool(claim_sets.keys() - set(self._required)))
        if counts is None:
            return []
        return [(keywords | counts, tuple(dict.fromkeys(claim_sets[name] for name in self._required)))]

    # ---- properties with a name -------------------------------------------------------------------------------

    def _all_names(self, named_only: list[str]) -> list[str]:
        """Returns all property names: first declared names in their order, then names that other keywords mention."""
        names = [name for shape in self._shapes for name in shape.named]
        names += [one.name for one in self._branch.of(Property)]
        names += self._required + sorted(self._forbidden) + named_only
        return list(dict.fromkeys(names))

    def _is_allowed(self, name: str) -> bool:
        if name in self._forbidden or not is_writable(name):
            return False
        return all(self._fitting.fits(name, frozenset({one.claim})) for one in self._names)

    def _goal(self, name: str) -> ClaimSet:
        return frozenset(self._asked.get(name, ())).union(
            *(self._fitting.claims_on(shape, name) for shape in self._shapes)
        )

    # ---- properties without -----------------------------------------------------------------------------------

    def _unnamed(self) -> tuple[Mapping[str, ClaimSet | bool], ClaimSet | bool, list[str]]:
        """Returns the claim sets by pattern, the claim set of all other properties, and further names that a list
        allows.

        The claim set of the other properties is False if there must be no other property.
        """
        by_pattern = [_claims_by_pattern(shape) for shape in self._shapes]
        everywhere: ClaimSet = frozenset().union(
            *(claims for found in by_pattern for text, claims in found.items() if text is None)
        )
        rests = [
            _union([shape.rest]) if None not in found else frozenset[Claim]()
            for shape, found in zip(self._shapes, by_pattern, strict=True)
        ]
        rest = everywhere.union(*rests)
        # If a shape lacks a pattern, its claim on other properties holds for the names of that pattern.
        claim_sets: dict[str, ClaimSet] = {
            text: everywhere.union(*(found.get(text, other) for found, other in zip(by_pattern, rests, strict=True)))
            for text in dict.fromkeys(text for found in by_pattern for text in found if text is not None)
        }
        is_closed = not self._expander.alternatives_of(rest, self._branch.demands[0].pointer) if rest else False
        return self._with_names(claim_sets, False if is_closed else rest)

    def _with_names(
        self, claim_sets: Mapping[str, ClaimSet], rest: ClaimSet | bool
    ) -> tuple[Mapping[str, ClaimSet | bool], ClaimSet | bool, list[str]]:
        if not self._names:
            return claim_sets, rest, []
        claims = frozenset(one.claim for one in self._names)
        alternatives = [
            one for one in self._expander.alternatives_of(claims, self._names[0].pointer) if STRING in one.types
        ]
        listed = [value for one in alternatives for value in _listed(one)]
        free = [one for one in alternatives if not any(demand.holds for demand in one.of(Among))]
        if not free:
            return {}, False, [value for value in listed if isinstance(value, str)]
        pattern = self._pattern_of_names(free)
        if pattern is None:
            return claim_sets, rest, []
        if claim_sets or listed:
            self._unenforced.record(
                self._names[0].pointer, "names by pattern beside other patterns cannot be enforced."
            )
            return claim_sets, rest, []
        return ({pattern: rest} if rest is not False else {}), False, []

    def _pattern_of_names(self, alternatives: list[Alternative]) -> str | None:
        """Returns the pattern that all names must match. None if any name is allowed, or if the names cannot be
        enforced.
        """
        asked: list[Node] = []
        for one in alternatives[0].demands:
            if isinstance(one, Matches):
                asked.append(one.pattern)
            elif isinstance(one, Length) and one.of == STRING:
                asked.append(length_between(one.least, one.most))
            elif isinstance(one, HasFormat) or (isinstance(one, Among) and any(isinstance(v, str) for v in one.values)):
                asked += [length_between(0, None)] * 2  # neither can be written as one pattern
        if len(alternatives) == 1 and len(asked) <= 1:
            return anchored(written(asked[0])) if asked else None
        lengths = [one for one in alternatives[0].of(Length) if one.of == STRING]
        if len(alternatives) == 1 and len(asked) == len(lengths):
            least = max(one.least for one in lengths)
            most = min((one.most for one in lengths if one.most is not None), default=None)
            return anchored(written(length_between(least, most)))
        self._unenforced.record(self._names[0].pointer, "names are enforced by one pattern, by lengths, or by a list.")
        return None

    # ---- counts -----------------------------------------------------------------------------------------------

    def _counts(self, is_closed: bool, num_allowed: int, *, has_optional: bool) -> dict[str, Any] | None:
        """Returns the keywords that limit the number of properties. None if no number fits.

        A model may write a property twice, but it counts once. A limit that this could break is not enforced, and this
        is recorded. llguidance 1.9.1 counts properties only if all declared names are required.
        """
        lengths = [one for one in self._branch.of(Length) if one.of == OBJECT]
        least = max((one.least for one in lengths), default=0)
        most = min((one.most for one in lengths if one.most is not None), default=None)
        for value in self._barred:
            if value == {}:
                least = max(least, 1)
            elif isinstance(value, dict):
                self._unenforced.record(
                    self._branch.demands[0].pointer, "that an object is not a given one cannot be enforced."
                )
        if (most is not None and most < max(least, len(self._required))) or (is_closed and least > num_allowed):
            return None
        if least > max(1, len(self._required)) and not is_closed:
            self._unenforced.record(lengths[0].pointer, "a count of properties with free names cannot be enforced.")
            least = 0
        if is_closed and most is not None and most >= num_allowed:
            most = None
        counts: dict[str, Any] = {"minProperties": least} if least > len(self._required) else {}
        counts |= {"maxProperties": most} if most is not None else {}
        if counts and has_optional:
            self._unenforced.record(
                lengths[0].pointer if lengths else self._branch.demands[0].pointer,
                "a count of properties beside optional ones cannot be enforced.",
            )
            return {}
        return counts


def _union(claims: Iterable[Claim | None]) -> ClaimSet:
    return frozenset(claim for claim in claims if claim is not None)


def _claims_by_pattern(shape: Properties) -> dict[str | None, ClaimSet]:
    """Returns the claims of a demand by pattern, as the engine spells the pattern. The key None stands for any name.

    Two patterns of a schema may get the same spelling; then their claims are joined.
    """
    found: dict[str | None, ClaimSet] = {}
    for pattern, claim in shape.patterns:
        text = None if is_universal(pattern) else anchored(written(pattern))
        found[text] = found.get(text, frozenset()) | _union([claim])
    return found


def _listed(alternative: Alternative) -> list[Any]:
    first = next((demand for demand in alternative.of(Among) if demand.holds), None)
    return list(first.values) if first is not None else []
