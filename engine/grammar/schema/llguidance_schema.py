"""Writes a core schema (see core_schema.py) for llguidance, with options that fix how JSON is spelled."""

from typing import Any

from graftwork.engine.grammar.schema.json_values import canonical

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ \\n\\r\\t]{0,8}",
    "json_allowed_escapes": '"\\bfnrt',
}
r"""The options for answers. Escapes such as `"\u0061"` are not allowed, because they are a second spelling of a
forbidden name.

Whitespace is limited, because some models fill their answers with it.
"""


_COMPACT_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
"""The options for drafts: the spelling that most programs use. Answers are never checked with these options."""


def compacted(text: str) -> str:
    """Returns a copy of a schema that `spelled` wrote for llguidance. The copy allows only one spelling of each
    answer.
    """
    return text.replace(canonical(_OPTIONS), canonical(_COMPACT_OPTIONS))


def spelled(core: dict[str, Any]) -> str:
    return canonical(core | {"x-guidance": _OPTIONS})
