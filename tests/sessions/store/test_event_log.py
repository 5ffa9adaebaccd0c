"""Tests of the event log: the group commit of events of running turns."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventDraft, EventFeed, output_text_delta, tool_call_done
from graftwork.sessions.core.lease import LeaseLost, SessionLease
from graftwork.sessions.store.event_log import MAX_WAITING_EVENTS, RETRY_AFTER_S, EventBatch, EventLog, EventStream
from tests.sessions.session_process import ManualTime, principal

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


class EventLogDriver:
    """A log over a recording store, with time that a test moves."""

    def __init__(self) -> None:
        self.time = ManualTime()
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


async def test_the_first_event_is_committed_at_once_and_later_ones_wait() -> None:
    """The first event after a pause is committed at once, and later ones together 20 ms after the first of them."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")

    await stream.put(A)
    await driver.time.advance(0)
    first = driver.shown("ses_1")
    await driver.time.advance(0.005)
    await stream.put(B)
    await driver.time.advance(0.010)
    await stream.put(C)
    await driver.time.advance(0.0099)
    before = driver.shown("ses_1")
    await driver.time.advance(0.0002)

    assert first == before == [(1, "a")]
    assert driver.shown("ses_1") == [(1, "a"), (2, "bc")]


async def test_turns_share_a_commit() -> None:
    """Events of several turns are committed as one group, and each turn's feed shows its own."""
    driver = EventLogDriver()
    first, second = driver.open("ses_1"), driver.open("ses_2")

    await first.put(A)
    await second.put(B)
    await driver.time.advance(0.001)

    assert driver.store.groups == [[("ses_1", [A]), ("ses_2", [B])]]
    assert (driver.shown("ses_1"), driver.shown("ses_2")) == ([(1, "a")], [(1, "b")])


async def test_nothing_is_shown_while_its_commit_runs() -> None:
    """Events that come during a commit of more than 20 ms are committed when it ends."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")
    driver.store.may_end.clear()
    await stream.put(A)
    await driver.time.advance(0.001)
    await stream.put(B)
    await driver.time.advance(0.1)
    shown = driver.shown("ses_1")

    driver.store.may_end.set()
    await driver.time.advance(0)

    assert shown == []
    assert driver.store.groups == [[("ses_1", [A])], [("ses_1", [B])]]


async def test_a_lost_lease_ends_its_own_turn_alone() -> None:
    """In a group, the turn whose lease is lost is told so, and the other is stored."""
    driver = EventLogDriver()
    lost, kept = driver.open("ses_1"), driver.open("ses_2")
    driver.store.lost.add("ses_1")

    await lost.put(A)
    await kept.put(B)
    await driver.time.advance(0.001)

    with pytest.raises(LeaseLost):
        await lost.failure()
    assert (driver.shown("ses_1"), driver.shown("ses_2")) == ([], [(1, "b")])


async def test_one_turn_that_cannot_be_stored_spoils_no_other() -> None:
    """A group that fails is stored turn by turn, each once; only the faulty turn fails, and takes no more events."""
    driver = EventLogDriver()
    faulty, sound = driver.open("ses_1"), driver.open("ses_2")
    driver.store.fails = lambda batches: ValueError("bad") if batches[0].lease.session_id == "ses_1" else None

    await faulty.put(X)
    await sound.put(B)
    await driver.time.advance(0.001)
    await faulty.put(A)
    await driver.time.advance(1)

    with pytest.raises(ValueError, match="bad"):
        await faulty.failure()
    assert driver.store.groups == [[("ses_2", [B])]]
    assert (driver.shown("ses_1"), driver.shown("ses_2")) == ([], [(1, "b")])


async def test_a_database_that_is_away_is_tried_again() -> None:
    """Events that could not be sent keep their numbers and are stored once, with those that came since."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")
    driver.store.fails = lambda batches: Unavailable("away")
    await stream.put(A)
    await driver.time.advance(RETRY_AFTER_S / 2)
    await stream.put(B)
    driver.store.fails = lambda batches: None

    await driver.time.advance(RETRY_AFTER_S)

    assert driver.shown("ses_1") == [(1, "a"), (2, "b")]


async def test_a_closed_stream_keeps_the_rest_for_the_outcome() -> None:
    """Closing waits for the commit that runs; what it did not store is left, and never sent by the log."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")
    driver.store.may_end.clear()
    await stream.put(A)
    await driver.time.advance(0.001)
    await stream.put(B)
    closing = asyncio.create_task(stream.close())
    await driver.time.advance(0.1)
    was_waiting = not closing.done()
    await stream.put(tool_call_done("call_1", "f", "{}"))  # type: ignore[arg-type]

    driver.store.may_end.set()
    await closing
    await driver.time.advance(1)

    assert was_waiting
    assert driver.store.groups == [[("ses_1", [A])]]
    assert stream.last_seq == 1
    assert [draft.type.value for draft in stream.rest()] == ["output_text.delta", "tool_call.done"]


async def test_a_group_whose_events_are_taken_out_is_not_committed() -> None:
    """No transaction begins for a group whose only turn has ended before its commit."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")
    await stream.put(A)
    await driver.time.advance(0.001)
    await stream.put(B)
    await driver.time.advance(0.001)

    await stream.close()
    await driver.time.advance(1)

    assert driver.store.groups == [[("ses_1", [A])]]
    assert list(stream.rest()) == [B]


async def test_a_turn_waits_when_too_many_of_its_events_are_not_stored() -> None:
    """With the database away a turn puts a bounded number of events; once they are stored it goes on."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")
    driver.store.fails = lambda batches: Unavailable("away")
    num_put = 0

    async def generate() -> None:
        nonlocal num_put
        for _ in range(2 * MAX_WAITING_EVENTS):
            await stream.put(A)
            num_put += 1

    generating = asyncio.create_task(generate())
    await driver.time.advance(10 * RETRY_AFTER_S)
    num_put_while_away = num_put
    driver.store.fails = lambda batches: None
    await driver.time.advance(10 * RETRY_AFTER_S)
    await generating

    assert num_put_while_away == MAX_WAITING_EVENTS
    assert "".join(delta for _, delta in driver.shown("ses_1")) == "a" * 2 * MAX_WAITING_EVENTS


@pytest.mark.parametrize(("interval_ms", "most"), [(0.5, 6), (1, 11), (2, 21), (2.5, 26), (5, 51), (25, 200)])
async def test_how_many_commits_a_turn_of_two_hundred_tokens_takes(interval_ms: float, most: int) -> None:
    """A turn takes one commit for each 20 ms, and at most one for each token."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")

    for _ in range(200):
        await stream.put(A)
        await driver.time.advance(interval_ms / 1000)
    await driver.time.advance(1)

    assert len(driver.store.groups) <= most
    assert "".join(delta for _, delta in driver.shown("ses_1")) == "a" * 200


async def test_closing_waits_for_the_commit_that_runs() -> None:
    """The log closes only after its running commit has ended, and then commits nothing more."""
    driver = EventLogDriver()
    stream = driver.open("ses_1")
    driver.store.may_end.clear()
    await stream.put(A)
    await driver.time.advance(0.001)
    await stream.put(B)

    closing = asyncio.create_task(driver.log.close())
    await driver.time.advance(0.1)
    was_closed = closing.done()
    driver.store.may_end.set()
    await closing
    await driver.time.advance(0.1)

    assert not was_closed
    assert driver.store.groups == [[("ses_1", [A])]]
