"""Defines the JSON answers of `/v1/chat/completions`: complete answers, and the chunks of a streamed answer."""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.completions import PromptLogprobs
from graftwork.platform.answers.usage import Usage

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionCall(Answer):
    """The function that the model calls in a tool call. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """One complete tool call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TokenLogprob(Answer):
    """A token and its log-probability.

    `bytes` is the UTF-8 encoding of the token. One token can be only a part of a character.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChosenTokenLogprob(TokenLogprob):
    """One token of the answer with its log-probability. `top_logprobs` has the most likely tokens at the same position."""

    top_logprobs: tuple[TokenLogprob, ...]


class ChatLogprobs(Answer):
    """The log-probabilities of the tokens of one answer, or of the tokens in one chunk of a streamed answer."""

    content: tuple[ChosenTokenLogprob, ...]
    refusal: None


class ChatMessage(Answer):
    """The complete message that the model wrote. `content` is null if the message has only tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None
    reasoning_content: str | None = absent()
    """The model's reasoning before its answer. Present only if there is any."""
    tool_calls: tuple[ToolCall, ...] | None = absent()


class Choice(Answer):
    """One complete answer of the model. A request with `n` gets `n` choices."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: tuple[int, ...] | None = absent()
    """The tokens that the model generated, stop tokens included. Present only with `return_token_ids`."""


class ChatCompletion(Answer):
    """The complete answer to one chat request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | None = absent()
    """Present only if the request set `return_token_ids`."""
    prompt_logprobs: PromptLogprobs | None = absent()
    """Present only if the request set `prompt_logprobs`."""

    @property
    def text(self) -> str:
        """The text of the first choice. It is empty if that choice has only tool calls."""
        return (self.choices[0].message.content or "") if self.choices else ""


class FunctionCallDelta(Answer):
    """The next part of a streamed function call. `arguments` is the next part of the JSON text.

    Only the first part of a call has the function's name.
    """

    name: str | None = absent()
    arguments: str


class ToolCallDelta(Answer):
    """The next part of a streamed tool call. `index` is the number of the tool call in the message, from 0.

    Only the first part of a call has `id` and `type`.
    """

    index: int
    id: str | None = absent()
    type: Literal["function"] | None = absent()
    function: FunctionCallDelta


class ChatDelta(Answer):
    """The next part of a streamed message: more reasoning, text or tool calls. Only the first part has `role`."""

    role: Literal["assistant"] | None = absent()
    content: str | None = absent()
    reasoning_content: str | None = absent()
    tool_calls: tuple[ToolCallDelta, ...] | None = absent()


class ChunkChoice(Answer):
    """The part of one choice that a chunk adds. Only the last chunk of a choice has a `finish_reason` that is not null."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | None = absent()
    """All tokens of the choice, in its last chunk. Present only with `return_token_ids`."""


class ChatCompletionChunk(Answer):
    """One chunk of a streamed answer.

    If the request set `include_usage`, there is one more chunk at the end. It has `usage`, and no choices.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    usage: Usage | None = absent()
    choices: tuple[ChunkChoice, ...]
    prompt_token_ids: tuple[int, ...] | None = absent()
    """Present in the first chunk of each choice if the request set `return_token_ids`."""

    @property
    def text(self) -> str:
        """The text that this chunk adds to the first choice that it contains; empty if the chunk has no choice."""
        return (self.choices[0].delta.content or "") if self.choices else ""
