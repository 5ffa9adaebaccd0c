"""Defines the events of one generation, after its tokens have become text and tool calls.

The first event is PromptAdmitted. PromptReported follows if the request asked for the log-probabilities of its prompt.
Deltas of the reasoning follow, then text deltas and tool calls in any number, and GenerationFinished is the last.
A tool call is ToolCallStarted, then any number of ToolCallArgumentsDelta, then ToolCallFinished. Calls never overlap.
An error can end the events at any point.
"""

from dataclasses import dataclass
from typing import Literal

from graftwork.engine.core.events import CacheReport, PromptAdmitted
from graftwork.platform.ids import CallId
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs, PromptTokenLogprobs
from graftwork.sessions.text.messages import Message, ToolCall

StopReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class PromptReported:
    """The log-probabilities of the prompt's tokens, one entry for each token."""

    tokens: tuple[PromptTokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer's text; never empty."""

    text: str
    logprobs: tuple[OutputTokenLogprobs, ...] = ()
    """One entry for each token that begins in this text, if the request asked for log-probabilities."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the model's reasoning before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model has begun a tool call. The arguments come in later events."""

    call_id: CallId
    index: int
    """The number of the call in this generation, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """The next piece of a call's arguments, as the model wrote them."""

    call_id: CallId
    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """The model has ended a tool call, or the answer broke off inside it. This event has the whole call."""

    call_id: CallId
    index: int
    name: str
    arguments: str
    """All pieces of the arguments, joined: JSON as the model wrote it."""
    complete: bool
    """Whether the arguments are a JSON object.

    It is False if the answer ended inside them, or if their JSON is wrong.
    """


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    """The last event of a generation. It has the whole output: text, tool calls and tokens."""

    reason: StopReason
    token_ids: tuple[int, ...]
    """All tokens that the model generated and the engine cached.

    Includes stop tokens, and the tokens of stop strings and call markers.
    """
    text: str
    """All text deltas joined."""
    tool_calls: tuple[ToolCallFinished, ...]
    cache: CacheReport
    logprobs: tuple[OutputTokenLogprobs, ...] | None = None
    """One entry for each token of the output; None if the request did not ask for log-probabilities."""
    num_logprobs_sent: int = 0
    """How many entries of `logprobs` were sent in text deltas."""
    stop_string: str | None = None
    """The stop string that ended the answer. It is not part of the text."""
    prompt_logprobs: tuple[PromptTokenLogprobs, ...] | None = None
    """One entry for each token of the prompt; None if the request did not ask for them."""
    reasoning: str | None = None
    """All deltas of the reasoning joined; None if the answer has none."""
    reasoning_tokens: int = 0
    """How many tokens the reasoning has, without its tags."""
    embedding: bytes | None = None
    """The embedding of the prompt, [hidden] in float32, little-endian; None if the request did not ask for it."""

    @property
    def unsent_logprobs(self) -> tuple[OutputTokenLogprobs, ...]:
        """The entries of `logprobs` that were not sent in a text delta."""
        return (self.logprobs or ())[self.num_logprobs_sent :]

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def message(self) -> Message:
        """Returns the output as a message of the assistant, for the prompt of the next turn."""
        calls = tuple(ToolCall(call.call_id, call.name, call.arguments) for call in self.tool_calls)
        return Message(role="assistant", content=self.text, tool_calls=calls, reasoning=self.reasoning)


OutputEvent = ReasoningDelta | TextDelta | ToolCallStarted | ToolCallArgumentsDelta | ToolCallFinished
GenerationEvent = PromptAdmitted | PromptReported | OutputEvent | GenerationFinished
