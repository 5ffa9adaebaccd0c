"""Defines the answers of Anthropic's `/v1/messages`, whole and as events."""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.errors import AnthropicErrorFields

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Answer):
    """A content block that holds text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Answer):
    """A content block that calls a tool. `input` holds the arguments."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """The token counts of one message. The three input counts add up to the length of the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard", "priority"] | None = absent()


class Message(Answer):
    """A complete answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[TextBlock | ToolUseBlock, ...]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage


class MessageStart(Answer):
    """The first event of a stream. It holds the message without its content."""

    type: Literal["message_start"]
    message: Message


class BlockStart(Answer):
    """Starts a content block."""

    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ToolUseBlock


class TextBlockDelta(Answer):
    """Adds text to a text block."""

    type: Literal["text_delta"]
    text: str


class InputJsonDelta(Answer):
    """Adds JSON text to a tool call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Answer):
    """Adds to the open content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextBlockDelta | InputJsonDelta


class BlockStop(Answer):
    """Ends the open content block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    """The reason why a message ends."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class MessageDelta(Answer):
    """Reports why the message ends, and its usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer):
    """The last event of a message that ended without an error."""

    type: Literal["message_stop"]


class MessagePing(Answer):
    """Keeps a silent connection open."""

    type: Literal["ping"]


class MessageFailure(Answer):
    """The last event of a message that failed after it started."""

    type: Literal["error"]
    error: AnthropicErrorFields


MESSAGE_EVENTS = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    MessagePing,
    MessageFailure,
)
