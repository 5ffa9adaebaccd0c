"""The answers of `/v1/chat/completions` and `/v1/models`, whole and in pieces."""

from dataclasses import dataclass
from typing import Any

from graftwork.api.sdk.types.base import Answer, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Answer):
    """A name that requests may put under `model`."""

    id: str = ""
    created: int = 0
    owned_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall(Answer):
    """`arguments` is JSON text; in a stream it comes in pieces to be joined."""

    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall(Answer):
    """One call; in a stream, `index` says which call a piece belongs to."""

    id: str | None = None
    type: str = "function"
    index: int = 0
    function: FunctionCall = FunctionCall()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage(Answer):
    """A whole message, or what a chunk adds to one."""

    role: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Answer):
    """One of the `n` answers. `finish_reason`: stop, length, tool_calls."""

    index: int = 0
    message: ChatMessage = ChatMessage()
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion(Answer):
    """A whole answer."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The first choice's text, empty if it only calls tools."""
        return (self.choices[0].message.content or "") if self.choices else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChoice(Answer):
    """What one chunk adds to one choice."""

    index: int = 0
    delta: ChatMessage = ChatMessage()
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionChunk(Answer):
    """A piece of a streamed answer; with `include_usage`, the last one carries `usage` and no choice."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: tuple[ChunkChoice, ...] = ()
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """What this chunk adds to the first choice's text."""
        return (self.choices[0].delta.content or "") if self.choices else ""
