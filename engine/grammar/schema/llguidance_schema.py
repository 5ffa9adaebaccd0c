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


_CONTROLS = {"json_allowed_escapes": '"\\bfnrtu'}
"""The changed options for schemas that list control characters; see `may_list_controls`.

With these options, llguidance 1.9.1 writes only control characters of listed values as \\u00XX. In names and strings
that are not listed, it allows every escape.
"""
_OPEN = frozenset({"patternProperties", "minLength", "maxLength"})
"""Keywords with which a string that is written with escapes could break the schema."""


def lists_controls(part: Any) -> bool:
    """Returns whether a core schema lists a value with a control character, which JSON writes as \\u00XX."""
    return "\\u00" in canonical(part)


def may_list_controls(part: Any) -> bool:
    """Returns whether a core schema accepts the same values if its strings may be written with escapes.

    That is so if no object in it allows further properties, and no length of a string is limited.
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
    """Returns a copy of a schema that `spelled` wrote for llguidance. The copy allows only one spelling of each
    answer.
    """
    for extra in ({}, _CONTROLS):
        text = text.replace(canonical(_OPTIONS | extra), canonical(_COMPACT_OPTIONS | extra))
    return text


def spelled(core: dict[str, Any]) -> str:
    return canonical(core | {"x-guidance": _OPTIONS | (_CONTROLS if lists_controls(core) else {})})
