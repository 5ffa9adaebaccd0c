"""Events on their way into the store."""

import asyncio
from collections.abc import Sequence

import pytest

from graftwork.platform.errors import CapacityAbsent
from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventDraft, EventFeed, SessionEvent, number_events, output_text_delta
from graftwork.sessions.core.lease import LeaseLost
from graftwork.sessions.turns.event_writer import EventWriter


class SlowStore:
    """Appends when it is let."""

    def __init__(self) -> None:
        self.groups: list[list[EventDraft]] = []
        self.may_end = asyncio.Event()
        self._last_seq = 0

    async def append(self, drafts: Sequence[EventDraft]) -> tuple[SessionEvent, ...]:
        self.groups.append(list(drafts))
        await self.may_end.wait()
        self._last_seq += len(drafts)
        return number_events(drafts, SessionId("ses_1"), TurnId("turn_1"), self._last_seq)


async def test_events_gather_while_a_write_is_under_way() -> None:
    """What arrives during a write goes together into the next, and is shown only once it is stored."""
    store, feed = SlowStore(), EventFeed(0)
    writer = EventWriter(store.append, feed)
    running = asyncio.create_task(writer.run())

    writer.put(output_text_delta("a"))
    await asyncio.sleep(0)
    writer.put(output_text_delta("b"))
    writer.put(output_text_delta("c"))
    seen_before = feed.after(0)
    store.may_end.set()
    while len(feed.after(0) or ()) < 2:
        await feed.next_change().wait()
    writer.stop()
    await running

    assert seen_before == ()
    assert store.groups == [[output_text_delta("a")], [output_text_delta("bc")]]


async def test_what_is_not_stored_is_left_for_the_end() -> None:
    """Stopping leaves what has not been written to whoever stores the turn's outcome."""
    store, feed = SlowStore(), EventFeed(0)
    writer = EventWriter(store.append, feed)
    store.may_end.set()
    writer.put(output_text_delta("a"))
    writer.stop()

    await writer.run()

    assert writer.rest() == [output_text_delta("a")]
    assert writer.rest() == []
    assert store.groups == []


async def test_failed_write_ends_the_writer() -> None:
    """What the store raises comes out of `run`."""

    async def fail(drafts: Sequence[EventDraft]) -> tuple[SessionEvent, ...]:
        raise LeaseLost(SessionId("ses_1"))

    writer = EventWriter(fail, EventFeed(0))
    writer.put(output_text_delta("a"))

    with pytest.raises(LeaseLost):
        await writer.run()


async def test_a_store_that_is_away_is_waited_for() -> None:
    """What could not be stored goes with what came since; what is still waiting at the end is left for the outcome."""
    store, feed, pauses = SlowStore(), EventFeed(0), list[float]()
    store.may_end.set()
    is_away = True

    async def append(drafts: Sequence[EventDraft]) -> tuple[SessionEvent, ...]:
        if is_away:
            raise CapacityAbsent("gone")
        return await store.append(drafts)

    async def pause(seconds: float) -> None:
        nonlocal is_away
        pauses.append(seconds)
        writer.put(output_text_delta("b"))
        is_away = len(pauses) != 2
        if len(pauses) == 3:
            writer.stop()

    writer = EventWriter(append, feed, pause)
    writer.put(output_text_delta("a"))
    running = asyncio.create_task(writer.run())
    async with asyncio.timeout(20):
        while not (feed.after(0) or ()):
            await feed.next_change().wait()
    is_away = True
    writer.put(output_text_delta("c"))
    await running

    assert store.groups == [[output_text_delta("abb")]]
    assert writer.rest() == [output_text_delta("cb")]
    assert len(pauses) == 3
