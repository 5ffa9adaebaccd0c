"""Defines the answers of `/v1/chat/completions`, whole and in chunks."""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.usage import Usage

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionCall(Answer):
    """The function that the model calls. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """One complete tool call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TokenLogprob(Answer):
    """A token and its log-probability. `bytes` are the token's UTF-8 bytes. They may be only a part of a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the answer, and the most likely tokens at the same position."""

    top_logprobs: tuple[TokenLogprob, ...]


class ChatLogprobs(Answer):
    """The log-probabilities of an answer's tokens."""

    content: tuple[ChosenTokenLogprob, ...]
    refusal: None


class ChatMessage(Answer):
    """A complete answer. `content` is null if the model only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None
    tool_calls: tuple[ToolCall, ...] | None = absent()


class Choice(Answer):
    """One of the `n` answers to a request."""

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
        """The text of the first choice; empty if the choice only calls tools."""
        return (self.choices[0].message.content or "") if self.choices else ""


class FunctionCallDelta(Answer):
    """Adds JSON text to a call's arguments. Only the call's first delta has the name."""

    name: str | None = absent()
    arguments: str


class ToolCallDelta(Answer):
    """Adds to the tool call with the number `index`. Only the call's first delta has the id and the type."""

    index: int
    id: str | None = absent()
    type: Literal["function"] | None = absent()
    function: FunctionCallDelta


class ChatDelta(Answer):
    """Adds to a message. Only the choice's first delta has the role."""

    role: Literal["assistant"] | None = absent()
    content: str | None = absent()
    tool_calls: tuple[ToolCallDelta, ...] | None = absent()


class ChunkChoice(Answer):
    """Adds to one choice. Only the choice's last chunk has a `finish_reason`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Answer):
    """One chunk of a streamed answer. With `include_usage`, the last chunk has `usage` and no choices."""

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
        """The text that this chunk adds to the first choice."""
        return (self.choices[0].delta.content or "") if self.choices else ""
