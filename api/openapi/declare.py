"""What routes declare for the OpenAPI document: further error statuses, and the events of a stream.

Most statuses are implied by a route's class; see `document.py`.
"""

from collections.abc import Sequence
from typing import Any

from graftwork.platform.answers import chat, completions, messages, responses, session_events
from graftwork.platform.answers.base import Answer

STREAMS: dict[str, tuple[type[Answer], ...]] = {
    "chat": (chat.ChatCompletionChunk,),
    "completions": (completions.TextCompletionChunk,),
    "messages": messages.MESSAGE_EVENTS,
    "responses": responses.RESPONSE_EVENTS,
    "session": (*session_events.SESSION_EVENTS, session_events.Ping),
}
"""The classes of each stream's events."""

EVENT_CLASSES = tuple(event for events in STREAMS.values() for event in events)
"""Every class that only streams show."""

Responses = dict[int | str, dict[str, Any]]


def also(*statuses: int, stream: str | None = None) -> Responses:
    """Declare errors that the route class does not imply, and a stream of `STREAMS` as an answer."""
    declared: Responses = {status: {} for status in statuses}
    if stream is not None:
        declared[200] = {"content": {"text/event-stream": {"schema": _one_of(STREAMS[stream])}}}
    return declared


def _one_of(events: Sequence[type[Answer]]) -> dict[str, Any]:
    """The schema of one event's `data`."""
    references = [{"$ref": f"#/components/schemas/{event.__name__}"} for event in events]
    return references[0] if len(references) == 1 else {"oneOf": references}
