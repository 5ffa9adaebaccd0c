"""Events of running turns on their way into the store."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventDraft, EventFeed, output_text_delta, tool_call_done
from graftwork.sessions.core.lease import LeaseLost, SessionLease
from graftwork.sessions.store.event_log import MAX_WAITING_EVENTS, RETRY_AFTER_S, EventBatch, EventLog, EventStream
from tests.sessions.fakes_sessions import Timeline, principal

SCOPE = principal().scope()
A, B, C, X = map(output_text_delta, "abcx")


class RecordingStore:
    """Remembers what it was asked to store; `fails` says which groups it refuses, and with what."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[str, list[EventDraft]]]] = []
        self.fails: Callable[[Sequence[EventBatch]], BaseException | None] = lambda batches: None
        self.lost: set[str] = set()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def append(self, batches: Sequence[EventBatch]) -> Sequence[bool | None]:
        await self.may_end.wait()
        error = self.fails(batches)
        if error is not None:
            raise error
        told = [
            (batch.lease.session_id, [EventDraft(event.type, event.fields) for event in batch.events])
            for batch in batches
        ]
        self.groups.append([entry for entry in told if entry[0] not in self.lost])
        return [None if session_id in self.lost else False for session_id, _ in told]


class Room:
    """A log over a recording store, with time that a test moves."""

    def __init__(self) -> None:
        self.time = Timeline()
        self.store = RecordingStore()
        self.log = EventLog(self.store.append, self.time.clock, self.time.pause)
        self.feeds: dict[str, EventFeed] = {}

    def open(self, name: str) -> EventStream:
        self.feeds[name] = EventFeed(0)
        lease = SessionLease(SessionId(name), SCOPE, TurnId(f"turn_{name}"), "first", 1)
        return self.log.open(lease, self.feeds[name], lambda: None)

    def shown(self, name: str) -> list[tuple[int, str]]:
        events = self.feeds[name].after(0)
        assert events is not None
        return [(event.seq, event.fields.get("delta", "")) for event in events]


async def test_the_first_event_goes_at_once_and_the_next_wait_twenty_milliseconds() -> None:
    """A quiet moment's first event is committed without a wait; later ones go together 20 ms after the first of them."""
    room = Room()
    stream = room.open("ses_1")

    await stream.put(A)
    await room.time.advance(0)
    first = room.shown("ses_1")
    await room.time.advance(0.005)
    await stream.put(B)
    await room.time.advance(0.010)
    await stream.put(C)
    await room.time.advance(0.0099)
    before = room.shown("ses_1")
    await room.time.advance(0.0002)

    assert first == before == [(1, "a")]
    assert room.shown("ses_1") == [(1, "a"), (2, "bc")]


async def test_turns_share_a_commit() -> None:
    """What several turns put in one moment is one group, and each turn's feed shows its own."""
    room = Room()
    first, second = room.open("ses_1"), room.open("ses_2")

    await first.put(A)
    await second.put(B)
    await room.time.advance(0.001)

    assert room.store.groups == [[("ses_1", [A]), ("ses_2", [B])]]
    assert (room.shown("ses_1"), room.shown("ses_2")) == ([(1, "a")], [(1, "b")])


async def test_nothing_is_shown_while_its_commit_runs() -> None:
    """Events that come during a commit gather, and go at once when it ends after more than 20 ms."""
    room = Room()
    stream = room.open("ses_1")
    room.store.may_end.clear()
    await stream.put(A)
    await room.time.advance(0.001)
    await stream.put(B)
    await room.time.advance(0.1)
    shown = room.shown("ses_1")

    room.store.may_end.set()
    await room.time.advance(0)

    assert shown == []
    assert room.store.groups == [[("ses_1", [A])], [("ses_1", [B])]]


async def test_a_lost_lease_ends_its_own_turn_alone() -> None:
    """In a group, the turn whose lease is lost is told so, and the other is stored."""
    room = Room()
    lost, kept = room.open("ses_1"), room.open("ses_2")
    room.store.lost.add("ses_1")

    await lost.put(A)
    await kept.put(B)
    await room.time.advance(0.001)

    with pytest.raises(LeaseLost):
        await lost.failure()
    assert (room.shown("ses_1"), room.shown("ses_2")) == ([], [(1, "b")])


async def test_one_turn_that_cannot_be_stored_spoils_no_other() -> None:
    """A group that fails is stored turn by turn, each once; only the faulty turn fails, and takes no more events."""
    room = Room()
    faulty, sound = room.open("ses_1"), room.open("ses_2")
    room.store.fails = lambda batches: ValueError("bad") if batches[0].lease.session_id == "ses_1" else None

    await faulty.put(X)
    await sound.put(B)
    await room.time.advance(0.001)
    await faulty.put(A)
    await room.time.advance(1)

    with pytest.raises(ValueError, match="bad"):
        await faulty.failure()
    assert room.store.groups == [[("ses_2", [B])]]
    assert (room.shown("ses_1"), room.shown("ses_2")) == ([], [(1, "b")])


async def test_a_database_that_is_away_is_tried_again() -> None:
    """Events that could not be sent keep their numbers and are stored once, with those that came since."""
    room = Room()
    stream = room.open("ses_1")
    room.store.fails = lambda batches: Unavailable("away")
    await stream.put(A)
    await room.time.advance(RETRY_AFTER_S / 2)
    await stream.put(B)
    room.store.fails = lambda batches: None

    await room.time.advance(RETRY_AFTER_S)

    assert room.shown("ses_1") == [(1, "a"), (2, "b")]


async def test_a_closed_stream_keeps_the_rest_for_the_outcome() -> None:
    """Closing waits for the commit that runs; what it did not store is left, and never sent by the log."""
    room = Room()
    stream = room.open("ses_1")
    room.store.may_end.clear()
    await stream.put(A)
    await room.time.advance(0.001)
    await stream.put(B)
    closing = asyncio.create_task(stream.close())
    await room.time.advance(0.1)
    was_waiting = not closing.done()
    await stream.put(tool_call_done("call_1", "f", "{}"))  # type: ignore[arg-type]

    room.store.may_end.set()
    await closing
    await room.time.advance(1)

    assert was_waiting
    assert room.store.groups == [[("ses_1", [A])]]
    assert stream.last_seq == 1
    assert [draft.type.value for draft in stream.rest()] == ["output_text.delta", "tool_call.done"]


async def test_a_turn_waits_when_too_many_of_its_events_are_not_stored() -> None:
    """With the database away a turn puts a bounded number of events; once they are stored it goes on."""
    room = Room()
    stream = room.open("ses_1")
    room.store.fails = lambda batches: Unavailable("away")
    num_put = 0

    async def generate() -> None:
        nonlocal num_put
        for _ in range(2 * MAX_WAITING_EVENTS):
            await stream.put(A)
            num_put += 1

    generating = asyncio.create_task(generate())
    await room.time.advance(10 * RETRY_AFTER_S)
    num_put_while_away = num_put
    room.store.fails = lambda batches: None
    await room.time.advance(10 * RETRY_AFTER_S)
    await generating

    assert num_put_while_away == MAX_WAITING_EVENTS
    assert "".join(delta for _, delta in room.shown("ses_1")) == "a" * 2 * MAX_WAITING_EVENTS


@pytest.mark.parametrize(("interval_ms", "most"), [(0.5, 6), (1, 11), (2, 21), (2.5, 26), (5, 51), (25, 200)])
async def test_how_many_commits_a_turn_of_two_hundred_tokens_takes(interval_ms: float, most: int) -> None:
    """About one commit in 20 ms: few with a fast engine, and one a token with an engine slower than that."""
    room = Room()
    stream = room.open("ses_1")

    for _ in range(200):
        await stream.put(A)
        await room.time.advance(interval_ms / 1000)
    await room.time.advance(1)

    assert len(room.store.groups) <= most
    assert "".join(delta for _, delta in room.shown("ses_1")) == "a" * 200
