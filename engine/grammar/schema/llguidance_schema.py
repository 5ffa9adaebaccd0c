"""Writes a core schema for llguidance, with options that fix how JSON is spelled."""

from typing import Any

from graftwork.engine.grammar.schema.json_values import canonical

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ \\n\\r\\t]{0,8}",
    "json_allowed_escapes": '"\\bfnrt',
}
"""No escapes such as `"\u0061"`, which would be a second spelling of a forbidden name.

Whitespace is limited, because some models fill their answers with it.
"""


_COMPACT_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
"""The spelling that most programs use. It serves only to draft answers, never to check them."""


def compacted(text: str) -> str:
    """Returns the grammar `spelled` with options that allow only one spelling of each answer."""
    return text.replace(canonical(_OPTIONS), canonical(_COMPACT_OPTIONS))


def spelled(core: dict[str, Any]) -> str:
    return canonical(core | {"x-guidance": _OPTIONS})
