"""The answers of Anthropic's `/v1/messages`, whole and as events."""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.errors import AnthropicErrorFields

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Answer):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Answer):
    """A call of a tool. `input` are its arguments."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """The tokens of one message. The three input counts sum to the prompt's tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard", "priority"] | None = absent()


class Message(Answer):
    """A whole answer."""

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
    """The first event: a message without content."""

    type: Literal["message_start"]
    message: Message


class BlockStart(Answer):
    """A content block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ToolUseBlock


class TextBlockDelta(Answer):
    """More text."""

    type: Literal["text_delta"]
    text: str


class InputJsonDelta(Answer):
    """More of a tool's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Answer):
    """More of the open content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextBlockDelta | InputJsonDelta


class BlockStop(Answer):
    """The open content block ends."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class MessageDelta(Answer):
    """The message ends, with its usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer):
    """The last event of a message that ended well."""

    type: Literal["message_stop"]


class MessagePing(Answer):
    """Nothing has happened for a while."""

    type: Literal["ping"]


class MessageFailure(Answer):
    """The last event of a message that failed after it had begun."""

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
