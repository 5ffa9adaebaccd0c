"""Defines the base classes of request bodies, and the fields that several bodies share.

The shared fields are answer formats, adapter mixtures, predictions and tools.
vLLM has two generations of fields for the format of an answer: `structured_outputs`, an object, and the older
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`. Each of them becomes one of the grammars of this
server. Options of vLLM that would change the answer in another way, such as its white space, are refused; those that only
choose vLLM's own backend are ignored. `sessions/generation/constraints.py` checks schemas and grammars.
Owns the lists of known fields that this server does not support. The server refuses such a field, unless its value has
no effect, such as null. The lists leave out fields that never change the answer (`metadata`, `store`,
`prompt_cache_key`), because the server ignores them.
Invariant: all bodies are strict. They refuse NaN, and text where a number must be. Bodies of OpenAI-compatible routes
ignore unknown fields; bodies of Graftwork's own (native) routes and of admin routes refuse them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from graftwork.api.schemas.integers import takes_integers, with_integers
from graftwork.api.schemas.shapes import ResponseFormatJson
from graftwork.engine.core.requests import MAX_MIXTURE, MAX_MIXTURE_WEIGHT, GrammarKind
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.sessions.generation.constraints import AskedFormat, ResponseFormatFields
from graftwork.sessions.generation.sampling import SamplingFields
from graftwork.sessions.tools.tool_choice import MAX_TOOLS, TOOL_NAME, tool_for_prompt

TierName = Literal["auto", "priority", "default", "flex"]


class RequestBody(BaseModel):
    """The base class of all request bodies.

    JSON has only one type of number, so an integer field accepts 5.0, but not 5.5.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())

    integer_fields: ClassVar[frozenset[str]] = frozenset()
    """The names of the fields that hold integers."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        names = (name for name, field in cls.model_fields.items() if takes_integers(field.annotation))
        cls.integer_fields = frozenset(names)

    @field_validator("*", mode="before")
    @classmethod
    def read_integral_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        return with_integers(value) if info.field_name in cls.integer_fields else value


class OpenAiBody(RequestBody):
    """A body of an OpenAI-compatible route. It ignores unknown fields, because newer clients may send more fields."""

    model_config = ConfigDict(extra="ignore")


class EndUserBody(OpenAiBody):
    """The fields that name the end user of a request. All requests of one end user get the same version of a canary."""

    user: str | None = None
    """An id of the end user for whom the request is made. Choose one that names nobody, such as a hash."""
    safety_identifier: str | None = None
    """The newer name of `user` in OpenAI's API. It counts if `user` is not set."""

    @property
    def end_user(self) -> str | None:
        return self.user or self.safety_identifier


class NativeBody(RequestBody):
    """A body of a route of Graftwork's own API. It refuses unknown fields, because they may be spelling mistakes."""

    model_config = ConfigDict(extra="forbid")


class SamplingBody(SamplingFields, OpenAiBody):
    """A body of an OpenAI-compatible route that generates text. It has the sampling fields."""

    @model_validator(mode="after")
    def fields_fit_together(self) -> Self:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise FieldError("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        if self.kv_budget is not None and self.attention_window is not None:
            raise FieldError("kv_budget", "and attention_window are two ways to forget: send one of them")
        if self.attention_sinks is not None and self.attention_window is None:
            raise FieldError("attention_sinks", "has no effect without attention_window: send both, or neither")
        return self


class FieldError(ValueError):
    """Raised by validators that check several fields. Names the wrong field and the reason."""

    def __init__(self, field: str, explanation: str) -> None:
        super().__init__(explanation)
        self.field = field


def check_prompt_end(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """Raises FieldError if a prompt would have to end inside the last message and also with the start of an answer."""
    if continue_final_message and add_generation_prompt:
        raise FieldError("add_generation_prompt", "continue_final_message excludes it; set it to false")


PromptLogprobs = Annotated[
    int | None,
    Field(
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="How many likely tokens to report beside each token of the prompt, with log-probabilities.",
    ),
]


def check_prompt_logprobs(asked: int | None, *, is_stream: bool) -> None:
    """Raises FieldError for log-probabilities of the prompt in a stream, whose chunks have no place for them."""
    if asked is not None and is_stream:
        raise FieldError("prompt_logprobs", "not available in a stream; leave stream out")


class MixturePart(NativeBody):
    """One adapter of a mixture, and its weight.

    A mixture adds the weight changes of several adapters to the base model.
    """

    model: str
    """The adapter's name in the same form as in the request's `model`: `name`, `name@3` or `name@alias`."""
    weight: Annotated[float, Field(ge=-MAX_MIXTURE_WEIGHT, le=MAX_MIXTURE_WEIGHT)] = 1.0
    """The factor by which the adapter's weight changes are multiplied."""


MixtureParts = Annotated[list[MixturePart], Field(min_length=1, max_length=MAX_MIXTURE)]


class PredictionPart(OpenAiBody):
    """One part of a prediction. A prediction is the text that the client expects in the answer."""

    type: Literal["text"]
    text: str


class Prediction(OpenAiBody):
    """The text that the client expects in the answer. A prediction can save time, but never changes the answer."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The whole text that the client expects. Parts are joined without separators."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class FunctionDefinition(OpenAiBody):
    """The name, the description and the parameters of a function that the model may call."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    """The name that the model calls. No two tools of a request have the same name."""
    description: str | None = None
    """What the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON Schema for the arguments. The model sees this schema unchanged."""
    strict: bool | None = None
    """If true, the server refuses a schema that it cannot fully enforce.

    If false, the server serves the request, and a header of the answer names the parts that are not enforced.
    """


class FunctionTool(OpenAiBody):
    """A function that the client itself runs, described as a tool for the model."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "function",
                    "function": {
                        "name": "get_weather",
                        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                    },
                }
            ]
        }
    )

    type: Literal["function"]
    function: FunctionDefinition
    """The function that the model may call."""

    def as_template_input(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect, without the fields that the client did not set."""
        return tool_for_prompt(self.model_dump(exclude_none=True))


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


IsNeutral = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    """Returns whether the value is null, false, zero or empty."""
    return not value


def _one(value: Any) -> bool:
    return value in (None, 1)


def _auto_or_none(value: Any) -> bool:
    return value in (None, "auto", "none")


_OTHER_FORMATS: dict[str, IsNeutral] = dict.fromkeys(
    ("json_schema", "ebnf", "guided_whitespace_pattern", "guided_json_object"), _empty
)


_LOGITS: dict[str, IsNeutral] = {
    "length_penalty": _one,
    "bad_words": _empty,
    "allowed_token_ids": _empty,
    "use_beam_search": _empty,
    "best_of": _one,
    "truncate_prompt_tokens": _empty,
}


COMPLETION_UNSUPPORTED: Mapping[str, IsNeutral] = {
    **_OTHER_FORMATS,
    **_LOGITS,
    "suffix": _empty,
    "top_logprobs": _empty,
    "prompt_embeds": _empty,
}


CHAT_UNSUPPORTED: Mapping[str, IsNeutral] = {
    **_OTHER_FORMATS,
    **_LOGITS,
    "functions": _empty,
    "function_call": _auto_or_none,
    "audio": _empty,
    "modalities": lambda value: value in (None, ["text"]),
    "web_search_options": lambda value: value is None,
    "echo": _empty,
    "chat_template": _empty,
    "documents": _empty,
}


def refuse_unsupported(body: Any, unserved: Mapping[str, IsNeutral]) -> Any:
    """Returns the body unchanged. Raises FieldError for an unsupported field that would change the answer.

    `unserved` maps each unsupported field to a function, which returns whether a value has no effect, such as null.
    """
    if isinstance(body, Mapping):
        for field, is_neutral in unserved.items():
            if field in body and not is_neutral(body[field]):
                raise FieldError(field, "this value is known, but not served here; leave the field out")
    return body


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
