"""Writes a core schema for llguidance, with options that fix how JSON is spelled."""

from typing import Any

from graftwork.engine.grammar.schema.json_values import canonical

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ \\n\\r\\t]{0,8}",
    "json_allowed_escapes": '"\\bfnrt',
}
"""No escapes such as `"\\u0061"`, which would be a second spelling of a forbidden name.

Whitespace is limited, because some models fill their answers with it.
"""


_COMPACT_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
"""The spelling that most programs use. It serves only to draft answers, never to check them."""


_CONTROLS = {"json_allowed_escapes": '"\\bfnrtu'}
"""For schemas that list control characters, where `may_list_controls`.

llguidance 1.9.1 then writes listed values with \\u00XX for these alone, but allows any escape in open names and strings.
"""
_OPEN = frozenset({"patternProperties", "minLength", "maxLength"})


def lists_controls(part: Any) -> bool:
    """Returns whether a core schema lists a value with a character that JSON writes as \\u00XX."""
    return "\\u00" in canonical(part)


def may_list_controls(part: Any) -> bool:
    """Returns whether a core schema stays exact if its strings may hold escapes: every object in it is closed, and no
    length is counted.
    """
    match part:
        case {"enum": list()}:
            return True
        case dict():
            is_open = part.get("type") == "object" and part.get("additionalProperties") is not False
            return not is_open and not _OPEN & part.keys() and all(map(may_list_controls, part.values()))
        case list():
            return all(map(may_list_controls, part))
        case _:
            return True


def compacted(text: str) -> str:
    """Returns the grammar `spelled` with options that allow only one spelling of each answer."""
    for extra in ({}, _CONTROLS):
        text = text.replace(canonical(_OPTIONS | extra), canonical(_COMPACT_OPTIONS | extra))
    return text


def spelled(core: dict[str, Any]) -> str:
    return canonical(core | {"x-guidance": _OPTIONS | (_CONTROLS if lists_controls(core) else {})})
