"""The typed events of a session's stream, one dataclass a type, and their reading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftwork.api.sdk.types.base import Answer, Usage
from graftwork.api.sdk.types.session import CacheReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent(Answer):
    """Base of the events, and what a type that this SDK does not know is read as.

    `seq` starts at 1 and has no gaps within a session.
    """

    type: str = ""
    seq: int = 0
    session_id: str = ""
    turn_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCreated(SessionEvent):
    """The turn's prompt was admitted."""

    cache: CacheReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTextDelta(SessionEvent):
    """More of the answer's text."""

    delta: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStarted(SessionEvent):
    """The model began to call a tool."""

    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallArgumentsDelta(SessionEvent):
    """More of a call's arguments, as JSON text."""

    call_id: str = ""
    delta: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDone(SessionEvent):
    """A whole call."""

    call_id: str = ""
    name: str = ""
    arguments: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAwaitingTool(SessionEvent):
    """The turn ended with calls that need outputs."""

    call_ids: tuple[str, ...] = ()
    lease: Any = None
    checkpoint_id: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCompleted(SessionEvent):
    """The turn ended with an answer."""

    checkpoint_id: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFailed(SessionEvent):
    """The turn ended with an error: `{"message", "type", "param", "code"}`."""

    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCancelled(SessionEvent):
    """The turn was cancelled."""


EVENT_BY_TYPE: Mapping[str, type[SessionEvent]] = {
    "turn.created": TurnCreated,
    "output_text.delta": OutputTextDelta,
    "tool_call.started": ToolCallStarted,
    "tool_call.arguments.delta": ToolCallArgumentsDelta,
    "tool_call.done": ToolCallDone,
    "turn.awaiting_tool": TurnAwaitingTool,
    "turn.completed": TurnCompleted,
    "turn.failed": TurnFailed,
    "turn.cancelled": TurnCancelled,
}

TERMINAL_EVENTS = (TurnAwaitingTool, TurnCompleted, TurnFailed, TurnCancelled)
"""Exactly one of these ends each turn."""


def read_session_event(data: Mapping[str, Any]) -> SessionEvent:
    return EVENT_BY_TYPE.get(str(data.get("type")), SessionEvent).read(data)
