"""Defines the events of a session's stream. Each event type has its own class."""

from collections.abc import Mapping
from typing import Any, Literal

from graftwork.platform.answers.base import Answer
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.answers.sessions import Lease
from graftwork.platform.answers.usage import CacheReport, Usage


class SessionEvent(Answer):
    """The base of a session's events. The SDK uses this class for events of an unknown type.

    `seq` counts the session's events from 1 without gaps.
    """

    type: str
    seq: int
    session_id: str
    turn_id: str


class TurnCreated(SessionEvent):
    """The engine accepted the turn's prompt. `cache` is null if the turn ended before that."""

    type: Literal["turn.created"] = "turn.created"
    cache: CacheReport | None


class OutputTextDelta(SessionEvent):
    """Adds text to the answer."""

    type: Literal["output_text.delta"] = "output_text.delta"
    delta: str


class ToolCallStarted(SessionEvent):
    """The model started a tool call."""

    type: Literal["tool_call.started"] = "tool_call.started"
    call_id: str
    name: str


class ToolCallArgumentsDelta(SessionEvent):
    """Adds JSON text to a call's arguments."""

    type: Literal["tool_call.arguments.delta"] = "tool_call.arguments.delta"
    call_id: str
    delta: str


class ToolCallDone(SessionEvent):
    """The model finished a tool call. The event repeats the whole call."""

    type: Literal["tool_call.done"] = "tool_call.done"
    call_id: str
    name: str
    arguments: str


class TurnAwaitingTool(SessionEvent):
    """The turn ended with tool calls that need outputs."""

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
    """Keeps a silent connection open. A ping has no number, and the server never stores it."""

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
"""Every class of event that the server stores."""

TERMINAL_EVENTS = (TurnAwaitingTool, TurnCompleted, TurnFailed, TurnCancelled)
"""The classes of last events. Each turn ends with exactly one of them."""

_CLASS_BY_TYPE: Mapping[str, type[SessionEvent]] = {
    event_class.model_fields["type"].default: event_class for event_class in SESSION_EVENTS
}


def read_session_event(data: Mapping[str, Any]) -> SessionEvent:
    """Makes an event from its JSON. The event's type selects the class."""
    return _CLASS_BY_TYPE.get(str(data.get("type")), SessionEvent).read(data)
