"""The answers of `/v1/chat/completions`, whole and in chunks."""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.usage import Usage

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionCall(Answer):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """One whole call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TokenLogprob(Answer):
    """A token and its log-probability. `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the answer, and the likeliest tokens at its place."""

    top_logprobs: tuple[TokenLogprob, ...]


class ChatLogprobs(Answer):
    """The log-probabilities of an answer's tokens."""

    content: tuple[ChosenTokenLogprob, ...]
    refusal: None


class ChatMessage(Answer):
    """A whole answer. `content` is None where the model only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None
    tool_calls: tuple[ToolCall, ...] | None = absent()


class Choice(Answer):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """All answers to one request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text, empty if it only calls tools."""
        return (self.choices[0].message.content or "") if self.choices else ""


class FunctionCallDelta(Answer):
    """More of a call's arguments, as JSON text. The name is in the call's first delta only."""

    name: str | None = absent()
    arguments: str


class ToolCallDelta(Answer):
    """What a chunk adds to the call number `index`. The id and the type are in the call's first delta only."""

    index: int
    id: str | None = absent()
    type: Literal["function"] | None = absent()
    function: FunctionCallDelta


class ChatDelta(Answer):
    """What a chunk adds to a message. The role is in the choice's first delta only."""

    role: Literal["assistant"] | None = absent()
    content: str | None = absent()
    tool_calls: tuple[ToolCallDelta, ...] | None = absent()


class ChunkChoice(Answer):
    """What one chunk adds to one choice. Only the last chunk of a choice has a `finish_reason`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Answer):
    """A chunk of a streamed answer. With `include_usage`, the last chunk has `usage` and no choice."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    usage: Usage | None = absent()
    choices: tuple[ChunkChoice, ...]

    @property
    def text(self) -> str:
        """What this chunk adds to the first choice's text."""
        return (self.choices[0].delta.content or "") if self.choices else ""
