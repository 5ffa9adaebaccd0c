"""The way of a running turn's events into the store, and from there to its readers.

Owns the order: stored first, then shown. While one write is under way the next events gather and go together,
so that a slow database means larger groups, not a slower model.
Never writes the last events of a turn: those are stored with its outcome, in one transaction.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from graftwork.sessions.events import EventDraft, EventFeed, SessionEvent, join_deltas

Append = Callable[[Sequence[EventDraft]], Awaitable[tuple[SessionEvent, ...]]]
"""Stores events under the next numbers."""


class EventWriter:
    """Writes one turn's events. One task runs `run`, another calls the rest."""

    def __init__(self, append: Append, feed: EventFeed) -> None:
        self._append = append
        self._feed = feed
        self._waiting: list[EventDraft] = []
        self._arrived = asyncio.Event()
        self._is_stopped = False

    def put(self, draft: EventDraft) -> None:
        """Take an event; it is stored shortly."""
        self._waiting.append(draft)
        self._arrived.set()

    async def run(self) -> None:
        """Store and show what arrives until `stop`. Raises what the store raises."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._is_stopped:
                return
            self._feed.publish(await self._append(self._take()))

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
