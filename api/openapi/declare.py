"""Lets routes declare error statuses and streams for the OpenAPI document.

Owns the list of streams, with the events of each stream. Never changes how a route behaves.
A route's class already implies most error statuses. `document.py` adds these statuses.
"""

from collections.abc import Sequence
from typing import Any

from graftwork.platform.answers import chat, completions, messages, overview, responses, session_events
from graftwork.platform.answers.base import Answer

STREAMS: dict[str, tuple[type[Answer], ...]] = {
    "chat": (chat.ChatCompletionChunk,),
    "completions": (completions.TextCompletionChunk,),
    "messages": messages.MESSAGE_EVENTS,
    "responses": responses.RESPONSE_EVENTS,
    "overview": (overview.OverviewEvent, session_events.Ping),
    "session": (*session_events.SESSION_EVENTS, session_events.Ping),
}
"""Maps each kind of stream to the classes of the events in that stream."""

EVENT_CLASSES = tuple(event for events in STREAMS.values() for event in events)
"""The classes of the events in all streams. No answer outside a stream has one of these classes."""

Responses = dict[int | str, dict[str, Any]]


def also(*statuses: int, stream: str | None = None) -> Responses:
    """Declares error statuses that the route's class does not imply. Returns the value for the route's `responses`.

    `stream` is a key of STREAMS. It declares that the route can also answer with this stream.
    """
    declared: Responses = {status: {} for status in statuses}
    if stream is not None:
        declared[200] = {"content": {"text/event-stream": {"schema": _one_of(STREAMS[stream])}}}
    return declared


def _one_of(events: Sequence[type[Answer]]) -> dict[str, Any]:
    """Returns the schema for the `data` of one event."""
    references = [{"$ref": f"#/components/schemas/{event.__name__}"} for event in events]
    return references[0] if len(references) == 1 else {"oneOf": references}
