"""Describes the fields that sessions read themselves: messages, items, tool choices and answer formats.

The bodies take these fields as plain JSON, and the readers in sessions check them. The readers know the roles, the
tools and the calls of a history, and their errors name the field as the client wrote it.
So these models only describe the fields in the OpenAPI document. They never check a request.
Invariant: a value that its model refuses is refused by its reader. `tests/api/openapi/test_shapes.py` checks this.
The test names the few fields whose readers are more lenient.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from graftwork.sessions.core.items import INPUT_ROLES, TEXT_PARTS
from graftwork.sessions.generation.sampling import SessionSampling
from graftwork.sessions.responses.input import MAX_CALL_ID_CHARACTERS
from graftwork.sessions.text.messages import ROLES


@dataclass(frozen=True, slots=True)
class DocumentedAs:
    """Gives a field of a body the JSON Schema of another type. The field's own type still checks the requests."""

    type: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.type).core_schema)


class Shape(BaseModel):
    """The base of all shapes. A shape has only the fields that the server reads, and allows more."""

    model_config = ConfigDict(protected_namespaces=())


def given(field: str) -> dict[str, Any]:
    """Return the JSON Schema of an object that has this field with a value other than null."""
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def exactly_one(field: str, other: str) -> dict[str, Any]:
    """Return the JSON Schema of an object that has one of two fields. Generators of clients ignore these keywords.

    From `oneOf` they would make two classes, each without the fields.
    """
    return {"if": given(field), "then": {"not": given(other)}, "else": given(other)}


# ---- the text of messages ---------------------------------------------------------------------------------------


class TextPart(Shape):
    """A piece of a message's text. The names of the type have the same meaning."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"type": "text", "text": "How is the weather?"}]})

    type: Annotated[str, Field(json_schema_extra={"enum": list(TEXT_PARTS)})]
    text: str


class RefusalPart(Shape):
    """The text of an earlier answer in which the assistant refused a request."""

    type: Literal["refusal"]
    refusal: str
    """The text itself."""


ContentParts = list[TextPart | RefusalPart]

# ---- messages of chat completions -------------------------------------------------------------------------------


class FunctionCallParam(Shape):
    """The function that the assistant called."""

    name: Annotated[str, Field(min_length=1)]
    """The function's name."""
    arguments: str | None = None
    """The arguments as JSON text. Null means no arguments."""


class ToolCallParam(Shape):
    """A tool call in an earlier answer of the assistant."""

    id: str | None = None
    """The id that the tool's message names as `tool_call_id`."""
    type: Annotated[Any, Field(examples=["function"])] = "function"
    """Always `function`. The server does not read it."""
    function: FunctionCallParam
    """The function and its arguments."""


class ChatMessageParam(Shape):
    """One message of a chat. It needs `content` or `tool_calls`."""

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
    """The calls in an assistant's message."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    name: str | None = None
    """The name of the author or of the tool, for models whose template shows it."""
    reasoning_content: str | None = None
    """The reasoning of an assistant's message, for models whose template shows it."""


_MESSAGE_COUNT = Field(min_length=1, max_length=4096)
MessageList = Annotated[
    list[dict[str, Any]], _MESSAGE_COUNT, DocumentedAs(Annotated[list[ChatMessageParam], _MESSAGE_COUNT])
]
"""Messages in OpenAI's chat form, oldest first."""

# ---- items of sessions, responses and conversations -------------------------------------------------------------

InputRole = Annotated[str, Field(json_schema_extra={"enum": list(INPUT_ROLES)})]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARACTERS)]


class SessionMessage(Shape):
    """A message in the input of a turn. Unknown fields are refused. The server does not read `id` and `status`."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"role": "user", "content": "How is the weather?"}]}
    )

    type: Literal["message"] = "message"
    role: InputRole
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    id: Any = None
    """The server does not read it."""
    status: Any = None
    """The server does not read it."""


class InputMessage(Shape):
    """A message in the input of a response, or in a conversation."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "user", "content": "How is the weather?"}]})

    type: Literal["message"] | None = "message"
    role: InputRole
    content: str | Annotated[ContentParts, Field(min_length=1)]


class FunctionCallItem(Shape):
    """A tool call that the model made earlier."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    """The tool's name."""
    arguments: str
    """The arguments as JSON text."""


class FunctionCallOutputItem(Shape):
    """The output of a tool call."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"type": "function_call_output", "call_id": "call_1", "output": "sunny"}]}
    )

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[Any, Field(json_schema_extra={"not": {"type": "null"}})]
    """A text or a list of text parts. Other JSON, except null, becomes JSON text."""


SessionInput = Annotated[
    str | list[Any], DocumentedAs(str | Annotated[list[SessionMessage], Field(min_length=1, title="Messages")])
]
"""The input of a turn: a user's message, or messages."""
InputItemJson = Annotated[Any, DocumentedAs(InputMessage | FunctionCallItem | FunctionCallOutputItem)]

# ---- tool choices -----------------------------------------------------------------------------------------------


class FunctionName(Shape):
    """The name of a function."""

    name: str
    """The name of one of the request's tools."""


class NamedTool(Shape):
    """Names one of the request's tools."""

    type: Annotated[Any, Field(examples=["function"])] = "function"
    """Always `function`. The server does not read it."""
    function: FunctionName
    """The tool's function."""


class ToolChoiceFunction(Shape):
    """The answer must call this tool exactly once."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"type": "function", "function": {"name": "get_weather"}}]}
    )

    type: Literal["function"]
    function: FunctionName
    """The tool's function."""


class AllowedTools(Shape):
    """Some of the request's tools."""

    mode: Literal["auto", "required"]
    """Whether the answer must call one of the tools."""
    tools: list[NamedTool]
    """The tools that the answer may call."""


class ToolChoiceAllowed(Shape):
    """The answer may call only these tools. With the mode `required` it must call one."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """The tools that the answer may call."""


ToolChoiceJson = Annotated[
    str | dict[str, Any] | None,
    DocumentedAs(Literal["auto", "none", "required"] | ToolChoiceFunction | ToolChoiceAllowed | None),
    Field(description="Which tools the answer may call, and whether it must. By default it may call all of them."),
]
"""The `tool_choice` of chat completions and sessions."""


class ResponseNamedTool(FunctionName):
    """Names one of the request's tools, in the form of the Responses API."""

    type: Annotated[Any, Field(examples=["function"])] = "function"
    """Always `function`. The server does not read it."""


class ResponseToolChoiceFunction(FunctionName):
    """The answer must call this tool exactly once."""

    type: Literal["function"]


class ResponseToolChoiceAllowed(AllowedTools):
    """The answer may call only these tools. With the mode `required` it must call one."""

    type: Literal["allowed_tools"]
    tools: list[ResponseNamedTool]  # type: ignore[assignment]


ResponseToolChoiceJson = Annotated[
    str | dict[str, Any] | None,
    DocumentedAs(Literal["auto", "none", "required"] | ResponseToolChoiceFunction | ResponseToolChoiceAllowed | None),
    Field(description="Which tools the answer may call, and whether it must. By default it may call all of them."),
]
"""The `tool_choice` of the Responses API."""

# ---- answer formats ---------------------------------------------------------------------------------------------


class JsonSchemaFormat(Shape):
    """A JSON Schema for the whole answer."""

    name: Any = None
    """A name for the schema. The server does not read it."""
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema", description="The JSON Schema.")]
    strict: bool | None = None
    """If true, the server refuses a schema that it cannot fully enforce."""


class ResponseFormatText(Shape):
    """The answer is free text."""

    type: Literal["text"]


class ResponseFormatJsonObject(Shape):
    """The answer is any JSON object."""

    type: Literal["json_object"]


class ResponseFormatJsonSchema(Shape):
    """The answer is JSON that fits a schema."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "string"}}}]
        }
    )

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat
    """The schema and its options."""


class TextFormatJsonSchema(JsonSchemaFormat):
    """The answer is JSON that fits a schema. The Responses API has the schema's fields beside the type."""

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
