"""Defines the JSON answers of `/v1/messages` (Anthropic's API): complete messages, and the events of a streamed
message.
"""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.errors import AnthropicErrorFields

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Answer):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """The model's reasoning. `signature` is always empty on this server."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    """A part of a message's content that is a tool call. `input` has the arguments of the call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """The token counts of one message. The sum of the three input counts is the length of the prompt in tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard", "priority", "batch"] | None = absent()


class Message(Answer):
    """A complete message that the model wrote."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[TextBlock | ThinkingBlock | ToolUseBlock, ...]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage


class MessageStart(Answer):
    """The first event of a streamed message. `message` has all fields, but its content is still empty."""

    type: Literal["message_start"]
    message: Message


class BlockStart(Answer):
    """The event that starts a content block of a streamed message."""

    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextBlockDelta(Answer):
    """The next part of the text of a streamed content block."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    """The next part of the model's reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(Answer):
    """The next part of the JSON text of a tool call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Answer):
    """The event that adds text, or a part of a tool call's arguments, to the content block `index` of a streamed
    message.
    """

    type: Literal["content_block_delta"]
    index: int
    delta: TextBlockDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Answer):
    """The event that ends a content block of a streamed message."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    """The reason why the model ended a message."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class MessageDelta(Answer):
    """The event that reports why the model ended the message, and the message's token counts."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer):
    """The last event of a streamed message that ended without an error."""

    type: Literal["message_stop"]


class MessagePing(Answer):
    """An event without content. The server sends it when no other event is due, so that the connection stays open."""

    type: Literal["ping"]


class MessageFailure(Answer):
    """The last event of a streamed message that failed after its first event."""

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
