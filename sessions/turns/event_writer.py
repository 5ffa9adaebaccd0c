"""The way of a running turn's events into the store, and from there to its readers.

Owns the order: stored first, then shown. While one write is under way the next events gather and go together,
so that a slow database, or one that is away for a while, means larger groups, not a slower model.
Never writes the last events of a turn: those are stored with its outcome, in one transaction.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from graftwork.platform.errors import CapacityAbsent
from graftwork.sessions.core.events import EventDraft, EventFeed, SessionEvent, join_deltas
from graftwork.sessions.core.lease import Pause

AGAIN_AFTER_S = 0.5
"""Between two tries to reach a database that is away."""

Append = Callable[[Sequence[EventDraft]], Awaitable[tuple[SessionEvent, ...]]]
"""Stores events under the next numbers. Raises CapacityAbsent where it could not even begin to."""


class EventWriter:
    """Writes one turn's events. One task runs `run`, another calls the rest."""

    def __init__(self, append: Append, feed: EventFeed, pause: Pause = asyncio.sleep) -> None:
        self._append = append
        self._feed = feed
        self._pause = pause
        self._waiting: list[EventDraft] = []
        self._arrived = asyncio.Event()
        self._is_stopped = False

    def put(self, draft: EventDraft) -> None:
        """Take an event; it is stored shortly."""
        self._waiting.append(draft)
        self._arrived.set()

    async def run(self) -> None:
        """Store and show what arrives until `stop`. Raises what the store raises, but for its being away."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._is_stopped:
                return
            drafts = self._take()
            try:
                self._feed.publish(await self._append(drafts))
            except CapacityAbsent:
                self._waiting[:0] = drafts
                await self._pause(AGAIN_AFTER_S)
                self._arrived.set()

    def stop(self) -> None:
        """Let `run` end after the write that is under way."""
        self._is_stopped = True
        self._arrived.set()

    def rest(self) -> list[EventDraft]:
        """What has not been stored, once `run` has ended."""
        return self._take()

    def _take(self) -> list[EventDraft]:
        waiting, self._waiting = self._waiting, []
        return join_deltas(waiting)
