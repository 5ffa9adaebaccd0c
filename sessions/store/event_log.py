"""Stores the events of all running turns of this process. One commit stores the events of many turns.

    turn ── put ──► EventStream ┐
    turn ── put ──► EventStream ┼──► EventLog ── one transaction ──► database ──► the feed of each turn
    turn ── put ──► EventStream ┘

Owns the order: an event is stored first, and published to readers after that. An event waits at most 20 ms for its
commit to begin. If another commit still runs, the events wait for its end, and one commit then stores them all. Never
stores the last events of a turn, which are stored together with the turn's outcome.
Invariant: an event gets its number at the first attempt to store it and keeps this number. So it is stored only once,
even if the attempt is repeated.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable
from graftwork.sessions.core.events import EventDraft, EventFeed, SessionEvent, add_draft, number_events
from graftwork.sessions.core.lease import LeaseLost, Pause, SessionLease

_log = logging.getLogger("graftwork.sessions")

GROUP_WINDOW_S = 0.02
"""The longest time in seconds that an event waits for its commit to begin, unless another commit still runs."""
RETRY_AFTER_S = 0.5
"""The time in seconds between two attempts to reach a database that does not answer."""
MAX_WAITING_EVENTS = 1024
"""How many events of one turn may wait to be stored. The turn pauses at this number."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one turn that are stored in one transaction."""

    lease: SessionLease
    events: tuple[SessionEvent, ...]


Append = Callable[[Sequence[EventBatch]], Awaitable[Sequence[bool | None]]]
"""A function that stores batches in one transaction. Raises Unavailable if no transaction could begin.

Returns for each batch whether a client has asked to cancel the turn; None if the turn's lease is lost.
"""


class EventLog:
    """Stores the events of all running turns of this process. It runs a background task only while events wait."""

    def __init__(self, append: Append, clock: Clock, pause: Pause) -> None:
        self._append = append
        self._clock = clock
        self._pause = pause
        self._waiting: dict[EventStream, None] = {}
        self._waiting_since = 0.0
        """The time at which the first event of the next group was added."""
        self._committed_at = float("-inf")
        """The time at which the latest commit began."""
        self._task: asyncio.Task[None] | None = None
        self._storing: asyncio.Future[Sequence[bool | BaseException]] | None = None
        """The commit that runs now."""

    def open(self, lease: SessionLease, feed: EventFeed, on_cancel: Callable[[], None]) -> "EventStream":
        """Returns a new event stream for a turn that has begun. `feed` shows the stored events to readers.

        `on_cancel` is called if a commit finds that a client has asked to cancel the turn.
        """
        return EventStream(self, lease, feed, on_cancel)

    def add(self, stream: "EventStream") -> None:
        """Puts the events that wait in `stream` into the next commit."""
        if not self._waiting:
            self._waiting_since = self._clock.monotonic()
        self._waiting[stream] = None
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def discard(self, stream: "EventStream") -> None:
        """Takes the events of `stream` out of the next commit."""
        self._waiting.pop(stream, None)

    async def close(self) -> None:
        """Waits for the commit that runs now, and drops the events that still wait for a commit.

        Call this method after all turns have ended, and before the database closes. Otherwise a commit could still use
        a database connection.
        """
        self._waiting.clear()
        while self._storing is not None and not self._storing.done():
            await asyncio.wait({self._storing})
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._gather()
                if self._waiting:  # a turn that ends takes its events out of the group
                    await self._commit()
        finally:
            self._task = None

    async def _gather(self) -> None:
        """Waits until the next group may be stored. If no commit began recently, an event is stored at once."""
        wait_s = self._waiting_since + GROUP_WINDOW_S - self._clock.monotonic()
        is_quiet = self._waiting_since - self._committed_at >= GROUP_WINDOW_S
        if not is_quiet and wait_s > 0:
            await self._pause(wait_s)

    async def _commit(self) -> None:
        streams, self._waiting = list(self._waiting), {}
        self._committed_at = self._clock.monotonic()
        batches = [stream.begin_attempt() for stream in streams]
        self._storing = asyncio.ensure_future(self._store(batches))
        results = await self._storing
        self._storing = None
        for stream, result in zip(streams, results, strict=True):
            stream.end_attempt(result)
            if isinstance(result, Unavailable) and not stream.is_closed:
                self.add(stream)
        if any(isinstance(result, Unavailable) for result in results):
            await self._pause(RETRY_AFTER_S)

    async def _store(self, batches: Sequence[EventBatch]) -> Sequence[bool | BaseException]:
        """Stores the batches together. If that fails, stores each batch alone, so that only the faulty one fails."""
        (answers,) = await asyncio.gather(self._append(batches), return_exceptions=True)
        if isinstance(answers, Unavailable):
            return [answers] * len(batches)
        if isinstance(answers, BaseException):
            _log.warning("a group of events could not be stored; each turn's are stored alone", exc_info=answers)
            return [await self._store_alone(batch) for batch in batches]
        return [_result(batch, answer) for batch, answer in zip(batches, answers, strict=True)]

    async def _store_alone(self, batch: EventBatch) -> bool | BaseException:
        (answers,) = await asyncio.gather(self._append([batch]), return_exceptions=True)
        return answers if isinstance(answers, BaseException) else _result(batch, answers[0])


def _result(batch: EventBatch, answer: bool | None) -> bool | LeaseLost:
    return LeaseLost(batch.lease.session_id) if answer is None else answer


class EventStream:
    """The events of one running turn that are not stored yet. The turn adds events, and the EventLog stores them."""

    def __init__(self, log: EventLog, lease: SessionLease, feed: EventFeed, on_cancel: Callable[[], None]) -> None:
        self.is_closed = False
        self.error: BaseException | None = None
        """Why the turn's events could not be stored."""
        self.last_seq = feed.last_seq
        """The number of the last event that is stored."""
        self._log = log
        self._lease = lease
        self._feed = feed
        self._on_cancel = on_cancel
        self._waiting: list[EventDraft] = []
        """Events that are not stored yet. Neighbouring deltas are joined."""
        self._num_attempted = 0
        """How many of the first waiting drafts were sent to the store. These must not change any more."""
        self._num_put = 0
        """How many events wait to be stored, counted before deltas were joined."""
        self._num_put_attempted = 0
        self._has_room = _set_event()
        self._is_idle = _set_event()
        self._has_failed = asyncio.Event()

    async def put(self, draft: EventDraft) -> None:
        """Adds an event of the turn. The EventLog stores the event soon.

        If too many events of the turn are not stored yet, first waits until some are stored. Drops the event if an
        earlier event could not be stored.
        """
        await self._has_room.wait()
        if self.error is not None:
            return
        add_draft(self._waiting, draft, num_fixed=self._num_attempted)
        self._num_put += 1
        if self._num_put >= MAX_WAITING_EVENTS:
            self._has_room.clear()
        if not self.is_closed:
            self._log.add(self)

    async def failure(self) -> None:
        """Waits until the EventLog cannot store an event of the turn, and raises the error. Never returns a value."""
        await self._has_failed.wait()
        assert self.error is not None
        raise self.error

    async def close(self) -> None:
        """Stops giving events to the EventLog. If a commit with events of this stream runs now, waits for its end."""
        self.is_closed = True
        self._log.discard(self)
        await self._is_idle.wait()

    def rest(self) -> tuple[EventDraft, ...]:
        """Returns the events of the turn that are not stored, in order. Call this method after `close`.

        Without an error, the first of these events has the number `last_seq` + 1.
        """
        return tuple(self._waiting)

    def begin_attempt(self) -> EventBatch:
        """Returns all waiting events of the turn with their numbers, for the commit that begins now."""
        self._is_idle.clear()
        self._num_attempted = len(self._waiting)
        self._num_put_attempted = self._num_put
        return EventBatch(self._lease, self._numbered(self._waiting))

    def end_attempt(self, result: bool | BaseException) -> None:
        """Takes the result of the commit that `begin_attempt` has started.

        If `result` is a bool, the events are stored: publishes them to the readers. True means that a client has asked
        to cancel the turn.
        If `result` is Unavailable, the events wait for the next attempt. Any other error drops the events and is kept
        in `error`.
        """
        self._is_idle.set()
        if isinstance(result, Unavailable):
            return
        attempted, self._waiting = self._waiting[: self._num_attempted], self._waiting[self._num_attempted :]
        self._num_attempted = 0
        self._num_put -= self._num_put_attempted
        self._has_room.set()
        if isinstance(result, BaseException):
            self.error = result
            self._log.discard(self)
            self._has_failed.set()
            return
        events = self._numbered(attempted)
        self.last_seq = events[-1].seq
        self._feed.publish(events)
        if result:
            self._on_cancel()

    def _numbered(self, drafts: Sequence[EventDraft]) -> tuple[SessionEvent, ...]:
        return number_events(drafts, self._lease.session_id, self._lease.turn_id, self.last_seq + len(drafts))


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
