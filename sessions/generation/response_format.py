"""What an answer must look like, as requests say it: `response_format`, `regex`, `grammar` and `structural_tag`.

Owns their shapes and that at most one of them is given; what they mean to an engine is `answer_grammar`'s.
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
"""Beside `response_format`."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The one form that is asked for."""

    kind: GrammarKind
    param: str
    """The field that says so."""
    text: str = ""
    """In the kind's own writing; empty for schemas."""
    schema: Any = None
    """Of JSON; any object where any is asked for."""
    is_strict: bool = False
    """What cannot be enforced is refused; else it is let go and told."""


@dataclass(frozen=True, slots=True)
class FormFields:
    """The fields as they came. Null, and what is empty, asks for nothing."""

    response_format: Any = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def read(self) -> AnswerForm | None:
        """None where text is free. Raises InvalidRequest."""
        form = read_response_format(self.response_format)
        for name, kind in _FIELDS.items():
            if not (value := getattr(self, name)):
                continue
            if form is not None:
                raise InvalidRequest(
                    f"{form.param.partition('.')[0]} and {name} exclude each other: leave one of them out.", param=name
                )
            form = AnswerForm(kind, name, value if isinstance(value, str) else json.dumps(value))
        return form


FREE = FormFields()


def read_response_format(value: Any) -> AnswerForm | None:
    """None for free text. Raises InvalidRequest."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerForm(GrammarKind.JSON_OBJECT, "response_format", schema=ANY_OBJECT)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    raise InvalidRequest(
        "response_format.type must be 'text', 'json_object' or 'json_schema'.", param="response_format.type"
    )


def _json_schema(given: Any) -> AnswerForm:
    param = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with a name and a schema.", param=param)
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{param}.schema must be a JSON Schema.", param=f"{param}.schema")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{param}.strict must be true or false.", param=f"{param}.strict")
    return AnswerForm(GrammarKind.JSON_SCHEMA, f"{param}.schema", schema=schema, is_strict=strict is True)
