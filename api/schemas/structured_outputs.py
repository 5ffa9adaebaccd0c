"""Defines the fields that fix the format of an answer: OpenAI's, this server's own, and those of vLLM.

vLLM has two generations of such fields: `structured_outputs`, an object, and the older `guided_json`, `guided_regex`,
`guided_choice` and `guided_grammar`. Each of them becomes one of the grammars of this server.
Owns the shapes of vLLM's fields. Never checks a schema or a grammar: `sessions/generation/constraints.py` does. Options
of vLLM that would change the answer in another way, such as its white space, are refused. Options that only choose
vLLM's own backend are ignored.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from graftwork.api.schemas.base import FieldError, OpenAiBody, refuse_unsupported
from graftwork.api.schemas.shapes import ResponseFormatJson
from graftwork.engine.core.requests import GrammarKind
from graftwork.sessions.generation.constraints import AskedFormat, ResponseFormatFields

_SchemaOrText = Annotated[str | dict[str, Any] | bool | None, Field(description="A JSON Schema, or its JSON text.")]
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]] | None,
    Field(min_length=1, max_length=1024, description="Texts of which the answer must be one."),
]

_OTHER_ANSWERS = {
    "disable_any_whitespace": lambda value: not value,
    "disable_additional_properties": lambda value: not value,
    "whitespace_pattern": lambda value: value is None,
}
"""Options of `structured_outputs` that are not supported, each with a function that says if a value has no effect."""


class StructuredOutputs(OpenAiBody):
    """The format of the answer in vLLM's form. Exactly one of the fields must be set."""

    json_: Annotated[_SchemaOrText, Field(alias="json")] = None
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    choice: _Choices = None
    grammar: str | None = None
    """A grammar in EBNF that the answer must follow. The start rule is `root`."""
    json_object: bool | None = None
    """If true, the answer is any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Tags with JSON Schemas for parts of the answer."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_options(cls, body: Any) -> Any:
        return refuse_unsupported(body, _OTHER_ANSWERS)

    def asked(self) -> Iterator[AskedFormat]:
        """Yields the formats that the fields ask for. Raises FieldError for JSON that cannot be read."""
        yield from _json_schema(self.json_, "structured_outputs.json")
        yield from _text(GrammarKind.REGEX, self.regex, "structured_outputs.regex")
        yield from _choice(self.choice, "structured_outputs.choice")
        yield from _text(GrammarKind.EBNF, self.grammar, "structured_outputs.grammar")
        if self.json_object:
            yield AskedFormat("structured_outputs.json_object", GrammarKind.JSON_OBJECT, schema={"type": "object"})
        if self.structural_tag:
            tag = self.structural_tag if isinstance(self.structural_tag, str) else json.dumps(self.structural_tag)
            yield from _text(GrammarKind.STRUCTURAL_TAG, tag, "structured_outputs.structural_tag")


class ResponseFormatBody(OpenAiBody):
    """The fields that fix the format of the answer. A client may set only one of them.

    A null or empty value counts as missing.
    """

    response_format: ResponseFormatJson = None
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    grammar: str | None = None
    """A grammar in EBNF that the answer must follow. The start rule is `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Tags with JSON Schemas for parts of the answer. See engine/grammar/schema/structural_tags.py."""
    structured_outputs: StructuredOutputs | None = None
    """The format of the answer in vLLM's form."""
    guided_json: _SchemaOrText = None
    guided_regex: str | None = None
    """A regular expression that the whole answer must match. An older form of `structured_outputs.regex`."""
    guided_choice: _Choices = None
    guided_grammar: str | None = None
    """A grammar in EBNF. An older form of `structured_outputs.grammar`."""

    @model_validator(mode="after")
    def read_formats_of_vllm(self) -> "ResponseFormatBody":
        if self.structured_outputs is not None and len(list(self.structured_outputs.asked())) != 1:
            raise FieldError("structured_outputs", "set exactly one of json, regex, choice, grammar, json_object")
        list(self._asked())
        return self

    def response_format_fields(self) -> ResponseFormatFields:
        return ResponseFormatFields(
            self.response_format, self.regex, self.grammar, self.structural_tag, tuple(self._asked())
        )

    def _asked(self) -> Iterator[AskedFormat]:
        if self.structured_outputs is not None:
            yield from self.structured_outputs.asked()
        yield from _json_schema(self.guided_json, "guided_json")
        yield from _text(GrammarKind.REGEX, self.guided_regex, "guided_regex")
        yield from _choice(self.guided_choice, "guided_choice")
        yield from _text(GrammarKind.EBNF, self.guided_grammar, "guided_grammar")


def _text(kind: GrammarKind, text: str | None, param: str) -> Iterator[AskedFormat]:
    if text:
        yield AskedFormat(param, kind, text)


def _choice(choices: list[str] | None, param: str) -> Iterator[AskedFormat]:
    """Yields the choices as a regular expression."""
    if choices:
        yield AskedFormat(param, GrammarKind.REGEX, "|".join(map(_literal, choices)))


def _literal(text: str) -> str:
    """Returns a pattern of ECMA-262 that matches only this text."""
    return re.sub(r"[\\^$.*+?()\[\]{}|/\x00-\x1f\x7f\u2028\u2029]", _escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found.group()
    return f"\\u{ord(character):04x}" if not character.isprintable() else f"\\{character}"


def _json_schema(value: str | Mapping[str, Any] | bool | None, param: str) -> Iterator[AskedFormat]:
    """Yields a schema. Raises FieldError for text that is not a JSON schema."""
    if value is None or value == "":
        return
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FieldError(param, "the text is not JSON") from error
    if not isinstance(schema, Mapping | bool):
        raise FieldError(param, "must be a JSON Schema, or its JSON text")
    yield AskedFormat(param, GrammarKind.JSON_SCHEMA, schema=schema)
