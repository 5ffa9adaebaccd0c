"""Reads the keywords that make claims on the parts of a value: its properties, their names, and its items.

Each keyword is read in two ways: that it holds, and that it does not. Never expands a subschema itself: it asks for the
alternatives of a claim on it. A keyword whose negation cannot be expressed is not enforced, which is recorded.
"""

from collections.abc import Callable
from typing import Any

from graftwork.engine.grammar.patterns.nodes import Node, PatternError
from graftwork.engine.grammar.schema.constraints import (
    Alternative,
    Claim,
    Contains,
    Items,
    Length,
    Names,
    Presence,
    Properties,
    Property,
)
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.json_values import ALL_TYPES, ARRAY, OBJECT
from graftwork.engine.grammar.schema.keywords import ANYTHING, NOTHING, LeafKeywords, whole_number
from graftwork.engine.grammar.schema.schema_document import under


class PartKeywords:
    """Turns the keywords about parts of a value into alternatives: sets of types and demands, one of several by which a
    claim holds. A claim says that a value fits a subschema, or does not.
    """

    def __init__(
        self,
        alternatives: Callable[[Claim], list[Alternative]],
        leaves: LeafKeywords,
        unenforced: UnenforcedKeywords,
    ) -> None:
        """`alternatives` expands a claim on a subschema."""
        self._alternatives = alternatives
        self._leaves = leaves
        self._unenforced = unenforced

    def not_enforced(self, pointer: str, reason: str) -> list[Alternative]:
        """Records that the keyword at `pointer` is not enforced, and lets it hold for every value."""
        self._unenforced.record(pointer, reason)
        return ANYTHING

    def properties(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        named = self._map(schema, claim, "properties")
        patterned = self._map(schema, claim, "patternProperties")
        at = under(claim.pointer, "additionalProperties")
        rest = Claim(at) if "additionalProperties" in schema else None
        if not claim.holds:
            return self._not_properties(named, [*(child for _, child in patterned), *([rest] if rest else [])])
        patterns = [(pattern, child) for text, child in patterned if (pattern := self._pattern(text, child.pointer))]
        demand = Properties(dict(named), tuple(patterns), rest, claim.pointer, claim.silent)
        return [Alternative(ALL_TYPES, (demand,))]

    def _map(self, schema: dict[str, Any], claim: Claim, keyword: str) -> list[tuple[str, Claim]]:
        at = under(claim.pointer, keyword)
        value = schema.get(keyword, {})
        if not isinstance(value, dict):
            raise refused(at, f"{keyword} is an object of schemas.")
        return [(name, Claim(under(at, name))) for name in value]

    def _pattern(self, text: str, at: str) -> Node | None:
        try:
            pattern: Node = self._leaves.read_pattern(text)
        except PatternError as error:
            self._unenforced.record(at, f"the pattern is not served: {error}.")
            return None
        return pattern

    def _not_properties(self, named: list[tuple[str, Claim]], others: list[Claim]) -> list[Alternative]:
        for other in others:
            if self._alternatives(other.negated()):
                return self.not_enforced(other.pointer, "that some property does not fit cannot be enforced.")
        return [
            Alternative(frozenset({OBJECT}), (Presence(name, True, child.pointer), Property(name, no, child.pointer)))
            for name, child in named
            if self._alternatives(no := child.negated())
        ]

    def names(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        at = under(claim.pointer, "propertyNames")
        if not claim.holds:
            if not self._alternatives(Claim(at, False, True)):
                return NOTHING
            return self.not_enforced(at, "that some property's name does not fit cannot be enforced.")
        return [Alternative(ALL_TYPES, (Names(Claim(at), at),))]

    def items(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        listed = "prefixItems" if "prefixItems" in schema else "items"
        value = schema.get(listed)
        at = under(claim.pointer, listed)
        first = tuple(Claim(under(at, index)) for index in range(len(value))) if isinstance(value, list) else ()
        after = "items" if not isinstance(schema.get("items", []), list) else "additionalItems"
        has_rest = after == "items" or (after in schema and isinstance(schema.get("items"), list))
        rest = Claim(under(claim.pointer, after)) if has_rest else None
        if claim.holds:
            return [Alternative(ALL_TYPES, (Items(first, rest, claim.pointer, claim.silent),))]
        return self._not_items(first, rest)

    def _not_items(self, first: tuple[Claim, ...], rest: Claim | None) -> list[Alternative]:
        found: list[Alternative] = []
        wrong = [child.negated() for child in first]
        if rest is not None and self._alternatives(rest.negated()):
            if self._alternatives(rest):
                return self.not_enforced(rest.pointer, "that some item does not fit cannot be enforced.")
            found.append(Alternative(frozenset({ARRAY}), (Length(ARRAY, len(first) + 1, None, rest.pointer),)))
        for index, child in enumerate(wrong):
            if self._alternatives(child):
                demands = (
                    Length(ARRAY, index + 1, None, child.pointer),
                    Items((*[None] * index, child), None, child.pointer, True),
                )
                found.append(Alternative(frozenset({ARRAY}), demands))
        return found

    def contains(self, schema: dict[str, Any], claim: Claim) -> list[Alternative]:
        at = under(claim.pointer, "contains")
        least, most = (
            whole_number(schema[word], under(claim.pointer, word)) if word in schema else left_out
            for word, left_out in (("minContains", 1), ("maxContains", None))
        )
        if "contains" not in schema:
            return ANYTHING if claim.holds else NOTHING
        if claim.holds:
            if least == 0 and most is None:
                return ANYTHING
            return [Alternative(ALL_TYPES, (Contains(Claim(at), least or 0, most, at),))]
        if least == 1 and most is None:
            return [Alternative(frozenset({ARRAY}), (Items((), Claim(at, False, True), at, True),))]
        return self.not_enforced(at, "a count of items under a negation cannot be enforced.")
