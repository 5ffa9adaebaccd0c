"""Defines the events in the stream of a session. Each type of event has its own class."""

from collections.abc import Mapping
from typing import Any, Literal

from graftwork.platform.answers.base import Answer
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.answers.sessions import Lease
from graftwork.platform.answers.usage import CacheReport, TurnUsage


class SessionEvent(Answer):
    """The base class of the events of a session. An event of an unknown type is read as this class.

    `seq` counts the events of one session from 1, without gaps.
    """

    type: str
    seq: int
    session_id: str
    turn_id: str


class TurnCreated(SessionEvent):
    """The first event of a turn. `cache` shows how much of the turn's prompt was in the KV cache.

    The server sends this event when the engine accepts the prompt. If the turn ends before that, the server sends this
    event at the end of the turn, and `cache` is null.
    """

    type: Literal["turn.created"] = "turn.created"
    cache: CacheReport | None


class ReasoningDelta(SessionEvent):
    """The event that adds text to the model's reasoning before its answer."""

    type: Literal["reasoning.delta"] = "reasoning.delta"
    delta: str


class OutputTextDelta(SessionEvent):
    """The event that adds text to the answer of a turn."""

    type: Literal["output_text.delta"] = "output_text.delta"
    delta: str


class ToolCallStarted(SessionEvent):
    """The event that reports that the model has started to write a tool call."""

    type: Literal["tool_call.started"] = "tool_call.started"
    call_id: str
    name: str


class ToolCallArgumentsDelta(SessionEvent):
    """The event that adds JSON text to the arguments of a tool call."""

    type: Literal["tool_call.arguments.delta"] = "tool_call.arguments.delta"
    call_id: str
    delta: str


class ToolCallDone(SessionEvent):
    """The event that reports that the model has finished a tool call. It has the name and all arguments of the call."""

    type: Literal["tool_call.done"] = "tool_call.done"
    call_id: str
    name: str
    arguments: str


class TurnAwaitingTool(SessionEvent):
    """The last event of a turn that ended with tool calls. The client must send their outputs."""

    type: Literal["turn.awaiting_tool"] = "turn.awaiting_tool"
    call_ids: tuple[str, ...]
    lease: Lease | None
    checkpoint_id: str | None
    usage: TurnUsage | None


class TurnCompleted(SessionEvent):
    """The last event of a turn that ended with an answer."""

    type: Literal["turn.completed"] = "turn.completed"
    checkpoint_id: str | None
    usage: TurnUsage | None
    finish_reason: str


class TurnFailed(SessionEvent):
    """The last event of a turn that ended with an error."""

    type: Literal["turn.failed"] = "turn.failed"
    error: ErrorFields | None


class TurnCancelled(SessionEvent):
    """The last event of a turn that was cancelled."""

    type: Literal["turn.cancelled"] = "turn.cancelled"


class Ping(Answer):
    """An event without content. The server sends it when no other event is due, so that the connection stays open.

    It has no number, and the server does not store it.
    """

    type: Literal["ping"] = "ping"


SESSION_EVENTS = (
    TurnCreated,
    ReasoningDelta,
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
"""The event classes that end a turn. Each turn ends with exactly one of these events."""

_CLASS_BY_TYPE: Mapping[str, type[SessionEvent]] = {
    event_class.model_fields["type"].default: event_class for event_class in SESSION_EVENTS
}


def read_session_event(data: Mapping[str, Any]) -> SessionEvent:
    """Makes a session event from its JSON object. The field `type` decides the class."""
    return _CLASS_BY_TYPE.get(str(data.get("type")), SessionEvent).read(data)
