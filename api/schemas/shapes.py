"""Describes messages, items, tool choices and answer formats for the OpenAPI document. Never checks a request.

The request bodies take these fields as plain JSON. Functions in the package `sessions`, called readers, check them.
The readers know the roles, the tools and the calls of a history, and their errors name the field as the client wrote
it.
Invariant: if a class of this file refuses a value, the reader of that field also refuses the value.
`tests/api/openapi/test_shapes.py` checks this, and names the few fields whose readers are more lenient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from graftwork.sessions.core.items import INPUT_ROLES, TEXT_PARTS
from graftwork.sessions.generation.sampling import SessionSampling
from graftwork.sessions.responses.tools import HOSTED_TYPES
from graftwork.sessions.text.messages import ROLES


@dataclass(frozen=True, slots=True)
class DocumentedAs:
    """Gives a field of a request body the JSON Schema of the type `type` in the OpenAPI document.

    The field's own type still checks the requests.
    """

    type: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.type).core_schema)


class Shape(BaseModel):
    """The base class of the classes here, which only describe JSON objects for the OpenAPI document.

    Such a class has only the fields that the server reads. An object may have more fields.
    """

    model_config = ConfigDict(protected_namespaces=())


def given(field: str) -> dict[str, Any]:
    """Returns the JSON Schema of an object in which the field `field` is not missing and not null."""
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def exactly_one(field: str, other: str) -> dict[str, Any]:
    """Returns the JSON Schema of an object that has exactly one of two fields.

    The schema uses `if` and `else`, because generators of clients ignore these keywords. For `oneOf`, a generator would
    make two classes, and neither class would have the fields.
    """
    return {"if": given(field), "then": {"not": given(other)}, "else": given(other)}


def having(field: str, value: Any) -> dict[str, Any]:
    """Returns the JSON Schema of an object in which the field `field` has exactly this value."""
    return {"required": [field], "properties": {field: {"const": value}}}


def positive(field: str) -> dict[str, Any]:
    """Returns the JSON Schema of an object in which the field `field` is a number above 0."""
    return {"required": [field], "properties": {field: {"type": "number", "exclusiveMinimum": 0}}}


def never(*combinations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON Schema of an object in which no combination holds. A combination holds if all its schemas do."""
    return {"not": {"anyOf": [{"allOf": list(schemas)} for schemas in combinations]}}


CLOSED_AND_OPEN = (having("continue_final_message", True), having("add_generation_prompt", True))
"""A prompt that ends inside its last message, and also with the start of an answer. No request can ask for both."""


# ---- the text of messages ---------------------------------------------------------------------------------------


class TextPart(Shape):
    """A piece of a message's text. All values of `type` mean the same."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"type": "text", "text": "How is the weather?"}]})

    type: Annotated[str, Field(json_schema_extra={"enum": list(TEXT_PARTS)})]
    text: str


class RefusalPart(Shape):
    """A piece of an earlier assistant message, in which the assistant refused a request."""

    type: Literal["refusal"]
    refusal: str
    """The text of the refusal."""


ContentParts = list[TextPart | RefusalPart]

# ---- messages of chat completions -------------------------------------------------------------------------------


class FunctionCallParam(Shape):
    """The function that the assistant called in an earlier message, and the arguments."""

    name: Annotated[str, Field(min_length=1)]
    """The function's name."""
    arguments: str | None = None
    """The arguments as JSON text. Null means no arguments."""


class ToolCallParam(Shape):
    """A tool call in an earlier message of the assistant."""

    id: str | None = None
    """The id of this tool call. The message with the result has the same id in `tool_call_id`."""
    type: Annotated[Any, Field(examples=["function"])] = "function"
    """Always `function`. The server does not read this field."""
    function: FunctionCallParam
    """The function and its arguments."""


class ChatMessageParam(Shape):
    """One message of a chat. It must have `content` or `tool_calls`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"role": "user", "content": "How is the weather?"}],
            "if": {"not": given("content")},
            "then": {
                "required": ["tool_calls"],
                "properties": {"tool_calls": {"type": "array", "items": {}, "minItems": 1}},
            },
        }
    )

    role: Annotated[str, Field(json_schema_extra={"enum": list(ROLES)})]
    """Who wrote the message. `developer` means the same as `system`."""
    content: str | list[TextPart | RefusalPart | str] | None = None
    """A text, or its parts. The server joins parts with line breaks."""
    tool_calls: list[ToolCallParam] | None = None
    """The tool calls in a message of the assistant."""
    tool_call_id: str | None = None
    """The id of the tool call whose result this message has."""
    name: str | None = None
    """The name of the author or of the tool, for models whose template shows it."""
    reasoning_content: str | None = None
    """The reasoning of an assistant's message, for models whose template shows it."""


_MESSAGE_COUNT = Field(min_length=1, max_length=4096)
MessageList = Annotated[
    list[dict[str, Any]], _MESSAGE_COUNT, DocumentedAs(Annotated[list[ChatMessageParam], _MESSAGE_COUNT])
]
"""Messages in OpenAI's chat form, oldest first."""

# ---- the input of sessions --------------------------------------------------------------------------------------

InputRole = Annotated[str, Field(json_schema_extra={"enum": list(INPUT_ROLES)})]


class SessionMessage(Shape):
    """A message in the input of a session's turn.

    The server refuses unknown fields. It accepts `id` and `status`, but does not read them.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"role": "user", "content": "How is the weather?"}]}
    )

    type: Literal["message"] = "message"
    role: InputRole
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    id: Any = None
    """The server does not read this field."""
    status: Any = None
    """The server does not read this field."""


SessionInput = Annotated[
    str | list[Any], DocumentedAs(str | Annotated[list[SessionMessage], Field(min_length=1, title="Messages")])
]
"""The input of a turn: a user's message, or messages."""

# ---- tool choices -----------------------------------------------------------------------------------------------


class FunctionName(Shape):
    """The name of the function of a tool in the request."""

    name: Annotated[str, Field(min_length=1)]
    """The name of one of the request's tools."""


class NamedTool(Shape):
    """One of the tools in the request, by name."""

    type: Annotated[Any, Field(examples=["function"])] = "function"
    """Always `function`. The server does not read this field."""
    function: FunctionName
    """The function of the tool."""


class ToolChoiceFunction(Shape):
    """A tool choice with which the answer must call one named tool exactly once."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"type": "function", "function": {"name": "get_weather"}}]}
    )

    type: Literal["function"]
    function: FunctionName
    """The function of the tool that the answer must call."""


class AllowedTools(Shape):
    """The tools in the request that the answer may call, and whether the answer must call one of them."""

    mode: Literal["auto", "required"]
    """With `required`, the answer must call one of these tools. With `auto`, the model decides."""
    tools: Annotated[list[NamedTool], Field(min_length=1)]
    """The tools that the answer may call."""


class ToolChoiceAllowed(Shape):
    """A tool choice with which the answer may call only some of the tools in the request."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """The tools that the answer may call, and whether it must call one."""


ToolChoiceJson = Annotated[
    str | dict[str, Any] | None,
    DocumentedAs(Literal["auto", "none", "required"] | ToolChoiceFunction | ToolChoiceAllowed | None),
    Field(description="Which tools the answer may call, and whether it must. By default it may call all of them."),
]
"""The `tool_choice` of chat completions and sessions."""


class ResponseNamedTool(FunctionName):
    """One of the tools in the request, by name, for `tool_choice` in the Responses API."""

    type: Annotated[Any, Field(examples=["function"])] = "function"
    """Always `function`. The server does not read this field."""


class HostedToolParam(Shape):
    """One of the tools that OpenAI itself runs, by its type. The server leaves it out of the choice."""

    type: Annotated[str, Field(pattern=f"^({'|'.join(HOSTED_TYPES)})(_20|$)")]
    """Which of OpenAI's own tools this is."""


class ResponseToolChoiceFunction(FunctionName):
    """A tool choice with which the answer must call one named tool exactly once, in the form of the Responses API."""

    type: Literal["function", "custom"]
    namespace: str | None = None
    """The namespace of the tool."""


class ResponseToolChoiceAllowed(AllowedTools):
    """A tool choice with which the answer may call only some of the tools, in the form of the Responses API."""

    type: Literal["allowed_tools"]
    tools: Annotated[list[ResponseNamedTool | HostedToolParam], Field(min_length=1)]  # type: ignore[assignment]


ResponseToolChoiceJson = Annotated[
    str | dict[str, Any] | None,
    DocumentedAs(Literal["auto", "none", "required"] | ResponseToolChoiceFunction | ResponseToolChoiceAllowed | None),
    Field(description="Which tools the answer may call, and whether it must. By default it may call all of them."),
]
"""The `tool_choice` of the Responses API."""

# ---- answer formats ---------------------------------------------------------------------------------------------


class JsonSchemaFormat(Shape):
    """A JSON Schema for the answer, and its options. The whole answer is JSON that fits the schema."""

    name: Any = None
    """A name for the schema. The server does not read this field."""
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema", description="The JSON Schema.")]
    strict: bool | None = None
    """If true, the server refuses a schema that it cannot fully enforce."""


class ResponseFormatText(Shape):
    """An answer format: the answer is free text."""

    type: Literal["text"]


class ResponseFormatJsonObject(Shape):
    """An answer format: the answer is any JSON object."""

    type: Literal["json_object"]


class ResponseFormatJsonSchema(Shape):
    """An answer format: the answer is JSON that fits a schema."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "string"}}}]
        }
    )

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat
    """The schema and its options."""


class TextFormatJsonSchema(JsonSchemaFormat):
    """An answer format: the answer is JSON that fits a schema.

    In the Responses API, `schema` and its options stand beside `type`, and not in an object `json_schema`.
    """

    type: Literal["json_schema"]


ResponseFormatJson = Annotated[
    dict[str, Any] | None,
    DocumentedAs(ResponseFormatText | ResponseFormatJsonObject | ResponseFormatJsonSchema | None),
    Field(description="The format of the answer. By default the answer is free text."),
]
"""The `response_format` of chat completions, completions and sessions."""
TextFormatJson = Annotated[
    dict[str, Any] | None,
    DocumentedAs(ResponseFormatText | ResponseFormatJsonObject | TextFormatJsonSchema | None),
    Field(description="The format of the answer. By default the answer is free text."),
]
"""The `text.format` of the Responses API."""

SamplingJson = Annotated[
    dict[str, Any] | None,
    DocumentedAs(SessionSampling | None),
    Field(description="How the next token is chosen, and how long an answer may be."),
]
"""The `sampling` of sessions and turns."""
