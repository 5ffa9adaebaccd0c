"""What a generation is made of once its tokens are text: the events, in order.

PromptAdmitted, then any number of TextDelta and of calls (ToolCallStarted, ToolCallArgumentsDelta…, ToolCallFinished;
one call at a time), then GenerationFinished. Or an error raised.
"""

from dataclasses import dataclass
from typing import Literal

from graftwork.engine.core.events import CacheReport, PromptAdmitted
from graftwork.platform.ids import CallId
from graftwork.sessions.generation.logprobs import TokenScore
from graftwork.sessions.text.messages import Message, ToolCall

StopReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text; never empty."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    """Of the tokens that begin in it, where scores were asked for."""


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a tool; its arguments follow."""

    call_id: CallId
    index: int
    """Counts the calls of one generation from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """More of a call's arguments, as the model wrote them."""

    call_id: CallId
    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """All of a call."""

    call_id: CallId
    index: int
    name: str
    arguments: str
    """JSON as the model wrote it: all deltas, joined."""
    complete: bool
    """The arguments are a JSON object. False: the generation ended within them, or the model wrote them wrong."""


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    """The last event, with everything that was made."""

    reason: StopReason
    token_ids: tuple[int, ...]
    """Exactly what the model made and the engine has cached: with stop tokens, stop strings, and markup."""
    text: str
    """All text deltas, joined."""
    tool_calls: tuple[ToolCallFinished, ...]
    cache: CacheReport
    scores: tuple[TokenScore, ...] | None = None
    """Of all tokens of the answer; None where they were not asked for."""
    num_scores_told: int = 0
    """So many of them came with the text deltas."""
    stop_string: str | None = None
    """The stop string that ended the answer, where one did; it is no part of the text."""

    @property
    def untold_scores(self) -> tuple[TokenScore, ...]:
        """Those that no text delta has brought."""
        return (self.scores or ())[self.num_scores_told :]

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def message(self) -> Message:
        """The assistant's message as the next prompt tells of it."""
        calls = tuple(ToolCall(call.call_id, call.name, call.arguments) for call in self.tool_calls)
        return Message(role="assistant", content=self.text, tool_calls=calls)


AnswerEvent = TextDelta | ToolCallStarted | ToolCallArgumentsDelta | ToolCallFinished
GenerationEvent = PromptAdmitted | AnswerEvent | GenerationFinished
