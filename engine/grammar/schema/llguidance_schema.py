"""A core schema as llguidance reads it, with the one way of writing JSON that it is to allow."""

from typing import Any

from graftwork.engine.grammar.schema.json_values import canonical

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ \\n\\r\\t]{0,8}",
    "json_allowed_escapes": '"\\bfnrt',
}
"""No escape by number: `"\\u0061"` would be another way to write a name that is ruled out. Whitespace has a bound:
without one, models have been seen to fill their answers with it."""


_COMPACT_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
"""As most programs write JSON: what is guessed of an answer, never what it is held to."""


def compacted(text: str) -> str:
    """A grammar of `spelled` schemas with one spelling for each answer."""
    return text.replace(canonical(_OPTIONS), canonical(_COMPACT_OPTIONS))


def spelled(core: dict[str, Any]) -> str:
    return canonical(core | {"x-guidance": _OPTIONS})
