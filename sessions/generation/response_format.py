"""Reads the fields that constrain an answer's format: `response_format`, `regex`, `grammar` and `structural_tag`.

Owns their shapes, and the rule that a request gives at most one of them.
Never makes a grammar: `constraints.py` does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftwork.engine.core.requests import GrammarKind
from graftwork.platform.errors import InvalidRequest

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_FIELDS = {
    "regex": GrammarKind.REGEX,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
"""The fields besides `response_format`, and the kind of grammar that each holds."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The one format that a request asks for."""

    kind: GrammarKind
    param: str
    """The request field that asks for it."""
    text: str = ""
    """The grammar's text; empty for a JSON schema."""
    schema: Any = None
    """The JSON schema; None for other kinds."""
    is_strict: bool = False
    """If True, keywords that cannot be enforced are refused. If False, they are ignored and reported."""


@dataclass(frozen=True, slots=True)
class ResponseFormatFields:
    """The fields as the client sent them. None and empty values request no format."""

    response_format: Any = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def read(self) -> ResponseFormat | None:
        """Returns the requested format; None for free text. Raises InvalidRequest."""
        found = read_response_format(self.response_format)
        for name, kind in _FIELDS.items():
            if not (value := getattr(self, name)):
                continue
            if found is not None:
                raise InvalidRequest(
                    f"{found.param.partition('.')[0]} and {name} exclude each other: leave one of them out.", param=name
                )
            found = ResponseFormat(kind, name, value if isinstance(value, str) else json.dumps(value))
        return found


FREE_FORMAT = ResponseFormatFields()


def read_response_format(value: Any) -> ResponseFormat | None:
    """Reads `response_format`; None for free text. Raises InvalidRequest."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat(GrammarKind.JSON_OBJECT, "response_format", schema=ANY_OBJECT)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    raise InvalidRequest(
        "response_format.type must be 'text', 'json_object' or 'json_schema'.", param="response_format.type"
    )


def _json_schema(given: Any) -> ResponseFormat:
    param = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with a name and a schema.", param=param)
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{param}.schema must be a JSON Schema.", param=f"{param}.schema")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{param}.strict must be true or false.", param=f"{param}.strict")
    return ResponseFormat(GrammarKind.JSON_SCHEMA, f"{param}.schema", schema=schema, is_strict=strict is True)
