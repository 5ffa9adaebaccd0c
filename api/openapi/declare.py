"""Lets routes declare error statuses and streams for the OpenAPI document.

Owns the list of streams, with the events of each stream. Never changes how a route behaves.
A route's class already implies most error statuses. `document.py` adds these statuses.
"""

from typing import Any, get_args

from graftwork.platform.answers import chat, completions, messages, overview, responses, session_events
from graftwork.platform.answers.base import Answer
from graftwork.platform.answers.errors import ErrorAnswer

STREAMS: dict[str, tuple[type[Answer], ...]] = {
    "chat": (chat.ChatCompletionChunk,),
    "completions": (completions.TextCompletionChunk,),
    "messages": messages.MESSAGE_EVENTS,
    "responses": responses.RESPONSE_EVENTS,
    "overview": (overview.OverviewEvent, session_events.Ping),
    "session": (*session_events.SESSION_EVENTS, session_events.Ping),
}
"""Maps each kind of stream to the classes of the events in that stream."""

_UNNAMED = ("chat", "completions")
"""The streams in OpenAI's older form: their events have no name, and the last one is `[DONE]`."""
_NAMES: dict[type[Answer], str] = {overview.OverviewEvent: "overview"}
"""The names of events whose data has no field `type`."""

EVENT_CLASSES = tuple(event for events in STREAMS.values() for event in events)
"""The classes of the events in all streams. No answer outside a stream has one of these classes."""

Responses = dict[int | str, dict[str, Any]]


def also(*statuses: int, stream: str | None = None) -> Responses:
    """Declares error statuses that the route's class does not imply. Returns the value for the route's `responses`.

    `stream` is a key of STREAMS. It declares that the route can also answer with this stream.
    """
    declared: Responses = {status: {} for status in statuses}
    if stream is not None:
        declared[200] = {"content": {"text/event-stream": {"schema": stream_schema(stream)}}}
    return declared


def stream_schema(stream: str) -> dict[str, Any]:
    """Returns the schema of one server-sent event of a stream, in the form of OpenAPI 3.2: `event`, and `data` as text."""
    if stream in _UNNAMED:
        events = [_event(("message",), event, is_named=False) for event in STREAMS[stream]]
        events.append({"type": "object", "properties": {"data": {"const": "[DONE]"}}, "required": ["data"]})
    else:
        events = [_event(_names_of(event), event) for event in STREAMS[stream]]
    if not any("error" in _names_of(event) for event in STREAMS[stream]):
        events.append(_event(("error",), ErrorAnswer))
    return {"oneOf": events}


def _event(names: tuple[str, ...], data: type[Answer], *, is_named: bool = True) -> dict[str, Any]:
    name = {"const": names[0]} if len(names) == 1 else {"enum": list(names)}
    content = {
        "type": "string",
        "pattern": r"^\{",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"#/components/schemas/{data.__name__}"},
    }
    required = ["event", "data"] if is_named else ["data"]
    return {"type": "object", "properties": {"event": name, "data": content}, "required": required}


def _names_of(event: type[Answer]) -> tuple[str, ...]:
    """Returns the names that events of a class can have: the values of the field `type`."""
    kind = event.model_fields.get("type")
    return (_NAMES.get(event, "message"),) if kind is None else get_args(kind.annotation)
