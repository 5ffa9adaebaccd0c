"""Decides which core schemas are plain. xgrammar enforces plain schemas exactly, and compiles them in milliseconds.

The tests check this with two public suites of schemas. A schema is not plain if xgrammar enforces it loosely (open
objects with declared names, patterns, lengths, counts of properties) or compiles it slowly (many optional properties).
"""

from typing import Any

_MAX_OPTIONAL = 24
_MAX_WIDTH = 32
_MAX_ENUM = 256
_MAX_ITEMS = 64
_EXACT = {
    "null": frozenset({"type"}),
    "boolean": frozenset({"type"}),
    "string": frozenset({"type"}),
    "number": frozenset({"type"}),
    "integer": frozenset({"type"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
}


def is_plain(core: dict[str, Any]) -> bool:
    """Returns whether every part of a core schema is plain, so that xgrammar enforces the schema exactly."""
    top = {key: value for key, value in core.items() if key != "$defs"}
    return _is_plain(top) and all(_is_plain(one) for one in core.get("$defs", {}).values())


def _is_plain(schema: Any) -> bool:
    match schema:
        case {"$ref": str()}:
            return len(schema) == 1
        case {"anyOf": list(parts)}:
            return len(schema) == 1 and len(parts) <= _MAX_WIDTH and all(_is_plain(part) for part in parts)
        case {"enum": list(values)}:
            return len(schema) == 1 and len(values) <= _MAX_ENUM and all(_is_simple(value) for value in values)
        case {"type": str(name)} if schema.keys() <= _EXACT[name]:
            return _is_plain_array(schema) if name == "array" else name != "object" or _is_plain_object(schema)
        case _:
            return False


def _is_simple(value: Any) -> bool:
    return isinstance(value, str | bool | int | None) and (not isinstance(value, str) or value.isprintable())


def _is_plain_array(schema: dict[str, Any]) -> bool:
    counts = (schema.get("minItems", 0), schema.get("maxItems", 0))
    return "items" in schema and _is_plain(schema["items"]) and max(counts) <= _MAX_ITEMS


def _is_plain_object(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    optional = properties.keys() - set(schema.get("required", ()))
    return (
        schema.get("additionalProperties") is False
        and len(optional) <= _MAX_OPTIONAL
        and all(_is_simple(name) and _is_plain(one) for name, one in properties.items())
    )
