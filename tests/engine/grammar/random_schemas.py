"""Random JSON schemas from most of the keywords, over few names and values, and random values to try them with."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "ab", "c", ""])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, -1, 3.5, "", "a", "b", "ab", "2020-02-29", "x1"])

VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)

_TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
_COUNTS = st.integers(0, 3)
_PATTERNS = st.sampled_from(["^a", "b$", "^[ab]+$", "1", "^.?$", "a|^b", "^(a|x)\\d*$"])
_LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "type": _TYPES | st.lists(_TYPES, min_size=1, max_size=3, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    "minimum": st.integers(-1, 3),
    "maximum": st.sampled_from([-1, 0, 1.5, 3]),
    "exclusiveMinimum": st.integers(-1, 3),
    "exclusiveMaximum": st.sampled_from([0, 2, 3.5]),
    "multipleOf": st.sampled_from([1, 2, 0.5]),
    "minLength": _COUNTS,
    "maxLength": _COUNTS,
    "pattern": _PATTERNS,
    "format": st.sampled_from(["date", "int32"]),
    "minItems": _COUNTS,
    "maxItems": _COUNTS,
    "uniqueItems": st.booleans(),
    "minProperties": _COUNTS,
    "maxProperties": _COUNTS,
    "required": st.lists(NAMES, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
    "minContains": _COUNTS,
    "maxContains": _COUNTS,
    "$ref": st.sampled_from(["#/$defs/one", "#/$defs/two", "#"]),
}


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.lists(inner, min_size=1, max_size=2)
    parts = {
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "allOf": lists,
        "anyOf": lists,
        "oneOf": lists,
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "patternProperties": st.dictionaries(_PATTERNS, inner, max_size=1),
        "additionalProperties": inner,
        "propertyNames": inner,
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "unevaluatedProperties": inner,
        "prefixItems": lists,
        "items": inner,
        "contains": inner,
        "unevaluatedItems": inner,
    }
    every = {**_LEAVES, **parts}
    names = st.lists(st.sampled_from(sorted(every)), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: every[name] for name in chosen}))


_INNER: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.sampled_from(sorted(_LEAVES)).flatmap(lambda name: st.fixed_dictionaries({name: _LEAVES[name]})),
    _keywords,
    max_leaves=6,
)

SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.builds(
    lambda schema, one, two: (schema if isinstance(schema, dict) else {}) | {"$defs": {"one": one, "two": two}},
    _INNER,
    _INNER,
    _INNER,
)


def _closed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
        names = [name for name in required if name in properties]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    objects = st.builds(build, st.dictionaries(NAMES, inner, max_size=4), st.lists(NAMES, max_size=3, unique=True))
    arrays = st.builds(
        lambda items, least, most: {"type": "array", "items": items, "minItems": least, "maxItems": least + most},
        inner,
        st.integers(0, 1),
        st.integers(0, 2),
    )
    return objects | arrays | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3))


_PLAIN_LEAVES: st.SearchStrategy[Any] = st.builds(
    lambda name: {"type": name}, _TYPES.filter(lambda name: name != "array" and name != "object")
) | st.builds(
    lambda values: {"enum": values}, st.lists(SCALARS.filter(lambda value: value != 3.5), min_size=1, max_size=3)
)


def _is_grounded(schema: Any) -> bool:
    return bool(schema["$defs"]["self"]["anyOf"][1] != {"$ref": "#/$defs/self"})


PLAIN_SCHEMAS: st.SearchStrategy[Any] = (
    st.recursive(_PLAIN_LEAVES | st.just({"$ref": "#/$defs/self"}), _closed, max_leaves=6)
    .map(lambda schema: {"$ref": "#/$defs/self", "$defs": {"self": {"anyOf": [{"type": "null"}, schema]}}})
    .filter(_is_grounded)
)
"""Recursive, of closed objects: what xgrammar is given."""
