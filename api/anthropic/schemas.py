"""Defines the bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Owns the names of Anthropic's fields, and the list of fields that this server refuses. Never reads messages and their
blocks: `messages.py` does.
`translate.py` converts a body to a chat completion request, and then the checks of chat completions apply to its
values.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator

from graftwork.api.anthropic.blocks import AssistantMessageParam, SystemMessageParam, TextBlockParam, UserMessageParam
from graftwork.api.schemas.base import FieldError, IsNeutral, OpenAiBody, refuse_unsupported
from graftwork.api.schemas.shapes import DocumentedAs
from graftwork.sessions.generation.sampling import StopStrings, described_number
from graftwork.sessions.tools.tool_choice import MAX_TOOLS, TOOL_NAME

Block = dict[str, Any]


_MESSAGE_COUNT = Field(min_length=1, max_length=4096)
Texts = Annotated[str | list[Block], DocumentedAs(str | list[TextBlockParam])]

_UNSUPPORTED: Mapping[str, IsNeutral] = {
    "container": lambda value: not value,
    "inference_geo": lambda value: not value,
    "mcp_servers": lambda value: not value,
}
"""The fields that this server does not support, and that would change the answer or where it is made.

A request may have such a field only with a value that has no effect. Each function returns whether a value has no
effect. `hints.py` owns the fields that the server ignores.
"""


class ConversationMessage(OpenAiBody):
    """One message of the conversation. A `system` message may be at any place in the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    """With `next_user_message`, the model does not see a system message after a later message of the user."""


class CacheControl(OpenAiBody):
    """Asks the server to keep the prompt in its cache for a time. This is a hint: the server may need the memory."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    """How long to keep the prompt: `5m`, the default, or `1h`. The server ignores other times."""


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
    defer_loading: bool | None = None
    """If true, the model sees the tool only after a message has named it, in a tool's result or a system message."""
    cache_control: CacheControl | None = None
    """Asks the server to keep the prompt in its cache for a time."""


class ServerTool(OpenAiBody):
    """A tool that Anthropic defines or runs, such as web search. The server leaves it out of the prompt.

    A header of the answer names the tools that were left out.
    """

    type: Annotated[str, Field(json_schema_extra={"not": {"const": "custom"}})]
    """The tool and its version, for example `web_search_20250305`."""
    name: str | None = None
    """The name by which the model would call the tool. It has no effect."""


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return "custom" if kind is None or kind == "custom" else "hosted"


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("hosted")], Discriminator(_kind_of_tool)
]


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
    """The output settings of a request."""

    format: OutputFormat | None = None
    """The format of the answer. By default the answer is free text."""
    effort: str | None = None
    """How much work the model should do. The server ignores this hint."""


class ThinkingConfig(OpenAiBody):
    """Whether the model should think before it answers. The server ignores it for a model that does not reason."""

    type: str
    """Such as `enabled`, `adaptive` or `disabled`."""
    budget_tokens: Annotated[int | None, Field(ge=0)] = None
    """The most tokens of the model's thinking. After so many, the thinking ends and the answer follows."""


class ContextEdit(OpenAiBody):
    """One way to shorten a long conversation."""

    type: str
    """Such as `clear_tool_uses_20250919`."""


class ContextManagement(OpenAiBody):
    """How to shorten a long conversation. The server ignores this hint."""

    edits: list[ContextEdit] | None = None
    """The ways to shorten the conversation."""


class Metadata(OpenAiBody):
    """Facts about the request."""

    user_id: str | None = None
    """An id of the user for whom the request is made. All requests of one user get the same version of a canary."""


class CountTokensRequest(OpenAiBody):
    """The body of a request to count the tokens of a prompt. A null field counts as missing.

    The server ignores unknown fields, and a header of the answer names them.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[
        list[ConversationMessage],
        _MESSAGE_COUNT,
        DocumentedAs(Annotated[list[UserMessageParam | AssistantMessageParam | SystemMessageParam], _MESSAGE_COUNT]),
    ]
    system: Texts | None = None
    """The text of a system message before the conversation."""
    tools: Annotated[list[AnthropicTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    """Which tools the answer may call. By default it may call all of them."""
    thinking: ThinkingConfig | None = None
    """Whether the model should think before it answers. The server ignores it for a model that does not reason."""
    cache_control: CacheControl | None = None
    """Asks the server to keep the prompt in its cache for a time."""
    context_management: ContextManagement | None = None
    """How to shorten a long conversation. The server ignores this hint."""
    metadata: Metadata | None = None
    """Facts about the request. Only `user_id` has an effect."""
    thread: Annotated[Any, WithJsonSchema({"type": "null"})] = None
    """Not supported: send all messages of the conversation."""
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    output_config: OutputConfig | None = None
    """The output settings, such as the format of the answer."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_fields(cls, body: Any) -> Any:
        return refuse_unsupported(body, _UNSUPPORTED)

    @property
    def continues_last_message(self) -> bool:
        """Whether the answer continues the text of the last message, which is the assistant's."""
        return self.messages[-1].role == "assistant"

    @property
    def answer_format(self) -> OutputFormat | None:
        return (self.output_config and self.output_config.format) or self.output_format


class MessagesRequest(CountTokensRequest):
    """The body of a request for a message: the prompt, and the settings of the answer."""

    max_tokens: Annotated[int, described_number("max_tokens", ge=1)]
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    """Texts that end the answer."""
    temperature: Annotated[float | None, described_number("temperature", le=1)] = None
    top_p: Annotated[float | None, described_number("top_p")] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    """Keep only the k likeliest tokens; 0 keeps all."""
    service_tier: Literal["auto", "standard_only"] | None = None
