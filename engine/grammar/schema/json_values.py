"""Defines how JSON Schema sees JSON values: their types, and when two values are equal.

Whole numbers are a type of their own. 1 and 1.0 are equal; 1 and true are not.
"""

import json
from collections.abc import Hashable
from typing import Any

NULL, BOOLEAN, INTEGER, FRACTION, STRING, ARRAY, OBJECT = (
    "null", "boolean", "integer", "fraction", "string", "array", "object",
)  # fmt: skip
ALL_TYPES = frozenset({NULL, BOOLEAN, INTEGER, FRACTION, STRING, ARRAY, OBJECT})
"""All types of JSON values. `fraction` is a number that is not whole. No two types overlap."""
NUMBERS = frozenset({INTEGER, FRACTION})

TYPES_BY_NAME: dict[str, frozenset[str]] = {name: frozenset({name}) for name in ALL_TYPES - {FRACTION}} | {
    "number": NUMBERS
}


def type_of(value: Any) -> str:
    """Returns the JSON type of a parsed value. 1.0 is an integer."""
    match value:
        case None:
            return NULL
        case bool():
            return BOOLEAN
        case int():
            return INTEGER
        case float():
            return INTEGER if value.is_integer() else FRACTION
        case str():
            return STRING
        case list():
            return ARRAY
        case _:
            return OBJECT


def identity(value: Any) -> Hashable:
    """Returns a hashable key of a JSON value. Two keys are equal if JSON Schema calls the two values equal.

    So 1 equals 1.0 but not true, and the order of keys in an object does not matter.
    """
    match value:
        case bool() | None | str():
            return (type_of(value), value)
        case int() | float():
            return ("number", value)
        case list():
            return ("array", tuple(identity(item) for item in value))
        case _:
            return ("object", frozenset((key, identity(item)) for key, item in value.items()))


def canonical(value: Any) -> str:
    """Returns the compact JSON text of a value. The keys keep their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_writable(value: Any) -> bool:
    r"""Returns whether the strings in a value can be written without escapes such as `\u0061`.

    The grammar engines allow no such escapes, so that each name has only one spelling.
    """
    match value:
        case str():
            return all(character >= " " or character in "\b\f\n\r\t" for character in value)
        case list():
            return all(is_writable(item) for item in value)
        case dict():
            return all(is_writable(key) and is_writable(item) for key, item in value.items())
        case _:
            return True
