"""Defines the bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Owns the names of Anthropic's fields, and the list of fields that this server does not support. Never reads messages and
their blocks: `messages.py` does.
`translate.py` converts a body to a chat completion request, and then the checks of chat completions apply to its
values.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from graftwork.api.schemas.base import FieldError, IsNeutral, OpenAiBody, refuse_unsupported
from graftwork.api.schemas.shapes import DocumentedAs, Shape
from graftwork.sessions.generation.sampling import StopStrings, described_number
from graftwork.sessions.tools.tool_choice import MAX_TOOLS, TOOL_NAME

Block = dict[str, Any]


class TextBlockParam(Shape):
    """A piece of the text of a message or of a tool result."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"type": "text", "text": "How is the weather?"}]})

    type: Literal["text"]
    text: str


class ToolUseBlockParam(Shape):
    """A tool call in an earlier message of the assistant."""

    type: Literal["tool_use"]
    id: str
    """The id of this tool call."""
    name: Annotated[str, Field(min_length=1)]
    """The tool's name."""
    input: dict[str, Any]
    """The arguments of the call."""


class ToolResultBlockParam(Shape):
    """The result of a tool call, in a user's message."""

    type: Literal["tool_result"]
    tool_use_id: str
    """The id of the tool call that had this result."""
    content: str | list[TextBlockParam] | None = None
    is_error: bool | None = None
    """Whether the tool failed."""


class ThinkingBlockParam(Shape):
    """The model's reasoning in an earlier message of the assistant."""

    type: Literal["thinking"]
    thinking: str
    """The text of the reasoning."""


class ThinkingParam(Shape):
    """The request field `thinking`. This server does not support thinking, so the only allowed type is `disabled`."""

    type: Literal["disabled"]


class SystemMessageParam(Shape):
    """A system message. It may be at any place in the conversation."""

    role: Literal["system"]
    content: str | list[TextBlockParam]


class UserMessageParam(Shape):
    """A message of the user. It can contain text, results of tool calls, or both."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "user", "content": "How is the weather?"}]})

    role: Literal["user"]
    content: str | list[TextBlockParam | ToolResultBlockParam]


class AssistantMessageParam(Shape):
    """An earlier message of the assistant, with text, reasoning or tool calls."""

    role: Literal["assistant"]
    content: str | list[TextBlockParam | ToolUseBlockParam | ThinkingBlockParam]


_MESSAGE_COUNT = Field(min_length=1, max_length=4096)
Texts = Annotated[str | list[Block], DocumentedAs(str | list[TextBlockParam])]

_UNSUPPORTED: Mapping[str, IsNeutral] = {
    "container": lambda value: not value,
    "context_management": lambda value: not value,
    "diagnostics": lambda value: not value,
    "inference_geo": lambda value: not value,
    "mcp_servers": lambda value: not value,
    "speed": lambda value: value in (None, "standard"),
}
"""The fields that this server does not support. A request may have such a field only with a value that has no effect.

Each function returns whether a value has no effect.
The server ignores `metadata` and `cache_control`, because they do not change the answer. It caches every prefix anyway.
"""


class ConversationMessage(OpenAiBody):
    """One message of the conversation. A `system` message may be at any place in the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(OpenAiBody):
    """A tool that the client itself runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(json_schema_extra={"pattern": TOOL_NAME})]
    """The name that the model calls. No two tools of a request have the same name."""
    description: str | None = None
    """What the tool does, for the model."""
    input_schema: dict[str, Any]
    """A JSON Schema for the arguments. The model sees it unchanged."""
    strict: bool | None = None

    @field_validator("type", mode="before")
    @classmethod
    def refuse_server_tools(cls, value: object) -> object:
        if value not in (None, "custom"):
            raise ValueError(f"{value!r} is a tool of Anthropic's servers; only tools of your own are served here")
        return value


class ToolChoice(OpenAiBody):
    """Which tools the answer may call.

    With `auto`, the model decides. With `any`, the answer must call at least one tool. With `tool`, it must call the
    tool `name`. With `none`, it calls no tool.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"type": {"const": "tool"}}},
            "then": {"required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}},
        }
    )

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool that the answer must call, for the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """If true, an answer has at most one tool call."""

    @model_validator(mode="after")
    def require_tool_name(self) -> Self:
        if self.type == "tool" and not self.name:
            raise FieldError("name", "name the tool that is to be called")
        return self


class OutputFormat(OpenAiBody):
    """The format of the answer: JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="The JSON Schema of the answer.")]


class OutputConfig(OpenAiBody):
    """The output settings of a request. Only the format of the answer can be set."""

    format: OutputFormat | None = None
    """The format of the answer. By default the answer is free text."""
    effort: Annotated[str | None, WithJsonSchema({"type": "null"})] = None
    """Not supported: leave it out."""

    @field_validator("effort")
    @classmethod
    def refuse_effort(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("this model has one way to work; leave it out")
        return value


class CountTokensRequest(OpenAiBody):
    """The body of a request to count the tokens of a prompt. A null field counts as missing."""

    model: str
    messages: Annotated[
        list[ConversationMessage],
        _MESSAGE_COUNT,
        DocumentedAs(Annotated[list[UserMessageParam | AssistantMessageParam | SystemMessageParam], _MESSAGE_COUNT]),
    ]
    system: Texts | None = None
    """The text of a system message before the conversation."""
    tools: Annotated[list[CustomTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    """Which tools the answer may call. By default it may call all of them."""
    thinking: Annotated[dict[str, Any] | None, DocumentedAs(ThinkingParam | None)] = None
    """This server does not support thinking, so the only allowed type is `disabled`."""
    output_config: OutputConfig | None = None
    """The output settings, such as the format of the answer."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_fields(cls, body: Any) -> Any:
        return refuse_unsupported(body, _UNSUPPORTED)

    @field_validator("thinking")
    @classmethod
    def refuse_thinking(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "disabled":
            raise ValueError("this model does not think aloud; send {'type': 'disabled'} or leave it out")
        return value


class MessagesRequest(CountTokensRequest):
    """The body of a request for a message: the prompt, and the settings of the answer."""

    max_tokens: Annotated[int, described_number("max_tokens")]
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    """Texts that end the answer."""
    temperature: Annotated[float | None, described_number("temperature", le=1)] = None
    top_p: Annotated[float | None, described_number("top_p")] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    """Keep only the k likeliest tokens; 0 keeps all."""
    service_tier: Literal["auto", "standard_only"] | None = None

    @field_validator("messages")
    @classmethod
    def refuse_prefill(cls, value: list[ConversationMessage]) -> list[ConversationMessage]:
        if value[-1].role == "assistant":
            raise ValueError("the last message is the assistant's, and prefilled answers are not served")
        return value
