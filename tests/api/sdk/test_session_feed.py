"""Tests of a session's stream: each event comes once and in order, also after lost connections."""

import contextlib
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.api.sdk.transport.errors import APIConnectionError, NotFoundError, RateLimitError, ServerError
from graftwork.api.sdk.transport.sse import FrameParser
from graftwork.api.sdk.transport.tools import ToolOutput
from graftwork.platform.answers.session_events import (
    OutputTextDelta,
    SessionEvent,
    TurnCompleted,
    TurnCreated,
    read_session_event,
)
from tests.api.sdk.scripted_server import Reply, ScriptedServer, error, frame, session, stream
from tests.hypothesis_profiles import examples

EVENTS = [
    frame(1, "turn.created", cache=None),
    frame(2, "output_text.delta", delta="Hel"),
    frame(3, "output_text.delta", delta="lo"),
    frame(4, "turn.completed", checkpoint_id="ckp_9", usage=None),
]
PING = b"event: ping\ndata: {}\n\n"


def read(frames: list[bytes]) -> list[SessionEvent]:
    return [read_session_event(json.loads(found.data)) for each in frames for found in FrameParser().feed(each)]


def seqs(events: list[SessionEvent]) -> list[int]:
    return [event.seq for event in events]


def test_events_are_typed() -> None:
    """Each event type has its class, and the session gets its new head."""
    server = ScriptedServer(session(), stream(*EVENTS))
    conversation = server.client().sessions.create(model="base")

    events = list(conversation.turn("Hi", stream=True))

    assert [type(event) for event in events] == [TurnCreated, OutputTextDelta, OutputTextDelta, TurnCompleted]
    assert conversation.head == "ckp_9"
    assert server.body(1) == {"input": "Hi", "stream": True}


def test_a_break_is_resumed_from_the_last_event() -> None:
    """After a break, events are requested after the last one seen, and repeated ones are dropped."""
    replayed = stream(*EVENTS[1:])
    server = ScriptedServer(session(), stream(*EVENTS[:2], EVENTS[2][:20], broken=True), replayed)

    events = list(server.client().sessions.create(model="base").turn("Hi", stream=True))

    assert seqs(events) == [1, 2, 3, 4]
    assert server.lines[2] == "GET /v1/sessions/ses_1/events?after=2"
    assert server.requests[2].headers["last-event-id"] == "2"


def test_a_clean_end_before_the_turns_end_is_a_break() -> None:
    """A body that ends before the turn does is resumed."""
    server = ScriptedServer(session(), stream(*EVENTS[:3]), stream(EVENTS[3]))

    events = list(server.client().sessions.create(model="base").turn("Hi", stream=True))

    assert seqs(events) == [1, 2, 3, 4]


def test_pings_are_not_events() -> None:
    """Pings are not emitted."""
    server = ScriptedServer(session(), stream(PING, *EVENTS, PING))

    events = list(server.client().sessions.create(model="base").turn("Hi", stream=True))

    assert seqs(events) == [1, 2, 3, 4]


def test_a_server_that_stays_away_ends_the_stream() -> None:
    """After `max_retries` resumptions without a new event, the error is raised."""
    server = ScriptedServer(session(), stream(EVENTS[0], broken=True), *[stream(broken=True) for _ in range(2)])

    reading = server.client(max_retries=1).sessions.create(model="base").turn("Hi", stream=True)

    with pytest.raises(APIConnectionError):
        list(reading)


def test_progress_renews_the_patience() -> None:
    """Each new event resets the count of retries, so a line that often breaks is followed to the end."""
    server = ScriptedServer(session(), *[stream(event, broken=True) for event in EVENTS])

    events = list(server.client(max_retries=1).sessions.create(model="base").turn("Hi", stream=True))

    assert seqs(events) == [1, 2, 3, 4]


def test_an_unknown_position_is_not_guessed() -> None:
    """If the last event's number is unknown, a break before the first event starts the same turn again."""
    server = ScriptedServer(session(last_seq=None), stream(broken=True), stream(*EVENTS))
    conversation = server.client().sessions.get("ses_1")

    events = list(conversation.turn("Hi", stream=True))

    assert seqs(events) == [1, 2, 3, 4]
    assert server.lines[1:] == ["POST /v1/sessions/ses_1/turns"] * 2
    keys = [request.headers["idempotency-key"] for request in server.requests[1:]]
    assert keys[0] == keys[1]


def test_a_found_session_knows_its_position() -> None:
    """The answer for a session has its number of events, so that its events can be resumed."""
    server = ScriptedServer(session(last_seq=2), stream(broken=True), stream(*EVENTS))
    conversation = server.client().sessions.get("ses_1")

    events = list(conversation.events(after=2))

    assert seqs(events) == [3, 4]
    assert server.lines[1:] == ["GET /v1/sessions/ses_1/events?after=2"] * 2


def test_a_break_before_the_first_event_leads_to_no_other_turn() -> None:
    """Events of other clients' turns are not taken for this turn's events."""
    turn = [frame(seq + 4, event.type, delta="") for seq, event in enumerate(read(EVENTS), 1)]

    def answer(request: httpx.Request) -> Reply:
        if request.url.path.endswith("/turns"):
            return stream(broken=True) if len(server.requests) == 2 else stream(*turn)
        return session(last_seq=0) if request.url.path.endswith("/ses_1") else stream(*EVENTS)

    server = ScriptedServer(rule=answer)

    events = list(server.client().sessions.get("ses_1").turn("Hi", stream=True))

    assert seqs(events) == [5, 6, 7, 8]
    keys = [request.headers["idempotency-key"] for request in server.requests[1:]]
    assert keys[0] == keys[1]


def test_some_of_the_outputs_start_no_turn() -> None:
    """If calls still wait, the stream has no event, no error, and sends no second request."""
    stored = {"object": "tool_outputs", "status": "awaiting_tool", "outputs": [], "tool_calls": []}
    server = ScriptedServer(session(status="awaiting_tool"), httpx.Response(200, json=stored))
    conversation = server.client().sessions.get("ses_1")

    events = list(conversation.tool_outputs([ToolOutput("a", "1")], stream=True))

    assert (events, conversation.status, len(server.requests)) == ([], "awaiting_tool", 2)


def test_events_end_with_the_connection() -> None:
    """`/events` ends when no turn is running: its clean end is the end, also without a terminal event."""
    server = ScriptedServer(session(), stream(*EVENTS, frame(5, "turn.created", cache=None)))

    events = list(server.client().sessions.get("ses_1").events(after=0))

    assert seqs(events) == [1, 2, 3, 4, 5]


def test_events_of_unknown_types_are_kept() -> None:
    """A newer server's events come as SessionEvent, with their JSON."""
    server = ScriptedServer(session(), stream(frame(7, "turn.dreamt", depth=2)))

    (event,) = server.client().sessions.get("ses_1").events(after=6)

    assert (type(event), event.type, event.raw["depth"]) == (SessionEvent, "turn.dreamt", 2)


def test_a_refused_turn_raises_at_once() -> None:
    """The error comes from the call, not from the first iteration."""
    server = ScriptedServer(session(), error(429, {"x-should-retry": "false"}))
    conversation = server.client().sessions.create(model="base")

    with pytest.raises(RateLimitError):
        conversation.turn("Hi", stream=True)


def test_an_error_event_is_raised() -> None:
    """A failure within the stream is typed by its `type`."""
    failure = b'event: error\ndata: {"error": {"message": "Slow down.", "type": "rate_limit_error"}}\n\n'
    server = ScriptedServer(session(), stream(EVENTS[0], failure))
    reading = server.client().sessions.create(model="base").turn("Hi", stream=True)

    with pytest.raises(RateLimitError, match="Slow down"):
        list(reading)


def test_leaving_early_closes_the_connection() -> None:
    """Leaving the `with` releases the connection, and does not cancel the turn."""
    reply = stream(*EVENTS)
    server = ScriptedServer(session(), reply)

    with server.client().sessions.create(model="base").turn("Hi", stream=True) as reading:
        next(reading)

    assert reply.is_closed


@pytest.mark.parametrize("last", [EVENTS[3], b'event: error\ndata: {"error": {"message": "Gone."}}\n\n'])
async def test_an_ended_stream_holds_no_connection(last: bytes) -> None:
    """At the turn's end or a failure the connection is released, even if the server keeps it open."""
    plain, awaited = stream(last, PING), stream(last, PING)
    server = ScriptedServer(session(), plain, session(), awaited)

    with contextlib.suppress(ServerError):
        list(server.client().sessions.create(model="base").turn("Hi", stream=True))
    async with server.async_client() as client:
        conversation = await client.sessions.create(model="base")
        with contextlib.suppress(ServerError):
            [event async for event in conversation.turn("Hi", stream=True)]

        assert (plain.is_closed, awaited.is_closed) == (True, True)


async def test_the_async_stream_is_the_same() -> None:
    """Iterating an asynchronous stream opens it, and resumes it after breaks."""
    server = ScriptedServer(session(), stream(*EVENTS[:2], broken=True), stream(*EVENTS[1:]))

    async with server.async_client() as client:
        conversation = await client.sessions.create(model="base")
        events = [event async for event in conversation.turn("Hi", stream=True)]

    assert seqs(events) == [1, 2, 3, 4]


async def test_awaiting_a_stream_opens_it() -> None:
    """A refusal is raised by the await."""
    server = ScriptedServer(session(), error(404))

    async with server.async_client() as client:
        conversation = await client.sessions.create(model="base")
        with pytest.raises(NotFoundError):
            await conversation.turn("Hi", stream=True)


@settings(max_examples=examples(60))
@given(st.data())
def test_no_cut_loses_or_repeats_an_event(data: st.DataObject) -> None:
    """With cuts at any byte and overlapping replays, each event comes exactly once."""
    whole = b"".join(EVENTS)
    replies: list[Reply] = []
    for _ in range(data.draw(st.integers(0, 4))):
        cut = data.draw(st.integers(0, len(whole)))
        replies.append(stream(whole[:cut], broken=data.draw(st.booleans())))
    server = ScriptedServer(session(), *replies, stream(whole))

    events = list(server.client(max_retries=10).sessions.create(model="base").turn("Hi", stream=True))

    assert seqs(events) == [1, 2, 3, 4]
