"""The events of a session's stream, one class a type."""

from collections.abc import Mapping
from typing import Any, Literal

from graftwork.platform.answers.base import Answer
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.answers.sessions import Lease
from graftwork.platform.answers.usage import CacheReport, Usage


class SessionEvent(Answer):
    """Base of the events. An event of an unknown type is read as this.

    `seq` starts at 1 and has no gaps within a session.
    """

    type: str
    seq: int
    session_id: str
    turn_id: str


class TurnCreated(SessionEvent):
    """The turn's prompt was admitted. There is no report if the turn ended before that."""

    type: Literal["turn.created"] = "turn.created"
    cache: CacheReport | None


class OutputTextDelta(SessionEvent):
    """More of the answer's text."""

    type: Literal["output_text.delta"] = "output_text.delta"
    delta: str


class ToolCallStarted(SessionEvent):
    """The model began to call a tool."""

    type: Literal["tool_call.started"] = "tool_call.started"
    call_id: str
    name: str


class ToolCallArgumentsDelta(SessionEvent):
    """More of a call's arguments, as JSON text."""

    type: Literal["tool_call.arguments.delta"] = "tool_call.arguments.delta"
    call_id: str
    delta: str


class ToolCallDone(SessionEvent):
    """A whole call."""

    type: Literal["tool_call.done"] = "tool_call.done"
    call_id: str
    name: str
    arguments: str


class TurnAwaitingTool(SessionEvent):
    """The turn ended with calls that need outputs."""

    type: Literal["turn.awaiting_tool"] = "turn.awaiting_tool"
    call_ids: tuple[str, ...]
    lease: Lease | None
    checkpoint_id: str | None
    usage: Usage | None


class TurnCompleted(SessionEvent):
    """The turn ended with an answer."""

    type: Literal["turn.completed"] = "turn.completed"
    checkpoint_id: str | None
    usage: Usage | None
    finish_reason: str


class TurnFailed(SessionEvent):
    """The turn ended with an error."""

    type: Literal["turn.failed"] = "turn.failed"
    error: ErrorFields | None


class TurnCancelled(SessionEvent):
    """The turn was cancelled."""

    type: Literal["turn.cancelled"] = "turn.cancelled"


class Ping(Answer):
    """Nothing has happened for a while. It has no number and is never stored."""

    type: Literal["ping"] = "ping"


SESSION_EVENTS = (
    TurnCreated,
    OutputTextDelta,
    ToolCallStarted,
    ToolCallArgumentsDelta,
    ToolCallDone,
    TurnAwaitingTool,
    TurnCompleted,
    TurnFailed,
    TurnCancelled,
)
"""Every event that is stored."""

TERMINAL_EVENTS = (TurnAwaitingTool, TurnCompleted, TurnFailed, TurnCancelled)
"""Each turn ends with exactly one of these."""

_CLASS_BY_TYPE: Mapping[str, type[SessionEvent]] = {
    event_class.model_fields["type"].default: event_class for event_class in SESSION_EVENTS
}


def read_session_event(data: Mapping[str, Any]) -> SessionEvent:
    """Read an event's JSON as the class of its type."""
    return _CLASS_BY_TYPE.get(str(data.get("type")), SessionEvent).read(data)
