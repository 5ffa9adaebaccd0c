"""Turns the keywords that contain no other schema into alternatives of a schema.

Each keyword is read in two ways: that it holds, and that it does not. A keyword about one type, such as `minLength`,
allows all values of other types. So the negation of this keyword allows no values of other types.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

from graftwork.engine.grammar.patterns.nodes import PatternError, repeats
from graftwork.engine.grammar.patterns.reader import read_search
from graftwork.engine.grammar.schema.constraints import (
    Alternative,
    Among,
    Bound,
    Demand,
    Length,
    Matches,
    MultipleOf,
    Presence,
)
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.formats import demands_of
from graftwork.engine.grammar.schema.json_values import ALL_TYPES, ARRAY, NUMBERS, OBJECT, STRING, TYPES_BY_NAME
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.schema_document import under

ANYTHING = [Alternative(ALL_TYPES)]
NOTHING: list[Alternative] = []

Keyword = Callable[["LeafKeywords", str, dict[str, Any], str, bool], list[Alternative]]


def only(types: frozenset[str], demand: Demand, *, holds: bool) -> list[Alternative]:
    """Returns a list of one alternative of a schema, which makes `demand` on values of the given `types`.

    If `holds` is True, values of all other types fit the alternative too, because in JSON Schema a keyword about one
    type allows them. If `holds` is False, values of other types do not fit the alternative: then `demand` is the
    negation of a keyword.
    """
    return [Alternative(ALL_TYPES if holds else types, (demand,))]


class LeafKeywords:
    """Reads single keywords that contain no other schema. Keywords that cannot be enforced are recorded in
    `unenforced`.
    """

    def __init__(self, limits: LintLimits, unenforced: UnenforcedKeywords) -> None:
        self._limits = limits
        self._unenforced = unenforced

    def alternatives(self, keyword: str, schema: dict[str, Any], pointer: str, holds: bool) -> list[Alternative]:
        """Returns the alternatives of a keyword: the ways to meet it, or not to meet it if `holds` is False.

        `pointer` is the JSON pointer of `schema`. Raises InvalidRequest for a malformed keyword.
        """
        return _KEYWORDS[keyword](self, keyword, schema, under(pointer, keyword), holds)

    def _type(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        names = schema[keyword] if isinstance(schema[keyword], list) else [schema[keyword]]
        unknown = [name for name in names if not isinstance(name, str) or name not in TYPES_BY_NAME]
        if unknown or not names:
            raise refused(at, f"{unknown[0] if unknown else names!r} is no type.")
        types = frozenset[str]().union(*(TYPES_BY_NAME[name] for name in names))
        return [Alternative(types if holds else ALL_TYPES - types)]

    def _enum(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        if not isinstance(schema[keyword], list):
            raise refused(at, "enum is a list.")
        return [Alternative(ALL_TYPES, (Among(tuple(schema[keyword]), holds, at),))]

    def _const(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        return [Alternative(ALL_TYPES, (Among((schema[keyword],), holds, at),))]

    def _minimum(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        is_lower = keyword in ("minimum", "exclusiveMinimum")
        exclusive = keyword.startswith("exclusive")
        limit = schema[keyword]
        if exclusive and isinstance(limit, bool):  # in draft 4 this is a flag of the other keyword
            return ANYTHING if holds else NOTHING
        if not _is_number(limit):
            raise refused(at, "a limit is a number.")
        exclusive |= schema.get("exclusiveMinimum" if is_lower else "exclusiveMaximum") is True
        if holds:
            return only(NUMBERS, Bound(limit, is_lower, exclusive, at), holds=True)
        return only(NUMBERS, Bound(limit, not is_lower, not exclusive, at), holds=False)

    def _multiple_of(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        factor = schema[keyword]
        if not _is_number(factor) or factor <= 0:
            raise refused(at, "multipleOf is a number above 0.")
        if not holds:
            return self._not_enforced(at, "that a number is no multiple of another cannot be enforced.")
        return only(NUMBERS, MultipleOf(factor, at), holds=True)

    def _length(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        of = {"Length": STRING, "Items": ARRAY, "Properties": OBJECT}[keyword[3:]]
        bound = whole_number(schema[keyword], at)
        is_least = keyword.startswith("min") == holds
        if not holds:
            bound += -1 if keyword.startswith("min") else 1
        if bound < 0:
            return NOTHING
        most = self._limits.lower_count if is_least and of != STRING else self._limits.length_bound
        if bound > most:
            raise refused(at, f"{bound} is more than {most}.")
        demand = Length(of, bound, None, at) if is_least else Length(of, 0, bound, at)
        return only(frozenset({of}), demand, holds=holds)

    def _pattern(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        if not isinstance(schema[keyword], str):
            raise refused(at, "a pattern is a text.")
        if not holds:
            return self._not_enforced(at, "that a pattern is not found cannot be enforced.")
        try:
            pattern = self.read_pattern(schema[keyword])
        except PatternError as error:
            return self._not_enforced(at, f"the pattern is not served: {error}.")
        return only(frozenset({STRING}), Matches(pattern, at), holds=True)

    def read_pattern(self, text: str) -> Any:
        """Reads a regular expression and checks its limits.

        Raises PatternError if it exceeds a limit or cannot be enforced.
        """
        if len(text) > self._limits.pattern_length:
            raise PatternError(f"it is longer than {self._limits.pattern_length} characters")
        pattern = read_search(text)
        if repeats(pattern) > self._limits.pattern_repeats:
            raise PatternError(f"its counted repeats multiply to more than {self._limits.pattern_repeats}")
        return pattern

    def _format(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        name = schema[keyword]
        demands = demands_of(name, at)
        if demands is None or (demands and not holds):
            return self._not_enforced(at, f"the format {name!r} is not enforced{'' if holds else ' under a negation'}.")
        if not holds:
            return NOTHING
        return [Alternative(ALL_TYPES, demands)]

    def _required(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        names = schema[keyword]
        if isinstance(names, bool):  # in draft 3 this is a flag inside the property
            return self._not_enforced(at, "required is a list of names beside `properties`.")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refused(at, "required is a list of names.")
        if holds:
            return [Alternative(ALL_TYPES, tuple(Presence(name, True, at) for name in dict.fromkeys(names)))]
        return [Alternative(frozenset({OBJECT}), (Presence(name, False, at),)) for name in dict.fromkeys(names)]

    def _unique_items(self, keyword: str, schema: dict[str, Any], at: str, holds: bool) -> list[Alternative]:
        if schema[keyword] is False:
            return ANYTHING if holds else NOTHING
        most = schema.get("maxItems")
        if holds and isinstance(most, int) and most <= 1:
            return ANYTHING
        return self._not_enforced(at, "that items differ from one another cannot be enforced.")

    def _not_enforced(self, at: str, reason: str) -> list[Alternative]:
        self._unenforced.record(at, reason)
        return ANYTHING


_KEYWORDS: dict[str, Keyword] = {
    "type": LeafKeywords._type,
    "enum": LeafKeywords._enum,
    "const": LeafKeywords._const,
    "multipleOf": LeafKeywords._multiple_of,
    "pattern": LeafKeywords._pattern,
    "format": LeafKeywords._format,
    "required": LeafKeywords._required,
    "uniqueItems": LeafKeywords._unique_items,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), LeafKeywords._minimum),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), LeafKeywords._length
    ),
}
LEAF_KEYWORDS = tuple(_KEYWORDS)


def whole_number(value: object, at: str) -> int:
    """Returns a value as an int, after checking that it is a whole number from 0. Raises InvalidRequest if it
    is not.
    """
    if not _is_number(value) or value != int(value) or value < 0:
        raise refused(at, "a count is a whole number from 0.")
    return int(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
