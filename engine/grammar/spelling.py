"""A core schema as llguidance reads it, with the one way of writing JSON that it is to allow."""

from typing import Any

from graftwork.engine.grammar.json_values import canonical

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ \\n\\r\\t]{0,8}",
    "json_allowed_escapes": '"\\bfnrt',
}
"""No escape by number: `"\\u0061"` would be another way to write a name that is ruled out. Whitespace has a bound:
without one, models have been seen to fill their answers with it."""


def spelled(core: dict[str, Any]) -> str:
    return canonical(core | {"x-guidance": _OPTIONS})
