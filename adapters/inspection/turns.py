"""Decides whose upload the workers inspect next, so that one tenant's uploads do not delay those of all others.

Owns who has a worker and who waits for one. Never starts a worker. All methods may be called on any thread.
Invariant: a free worker goes to the owner (tenant) that has the fewest workers now; among equals, to the one that was
served longest ago. The uploads of one owner keep their order.
"""

import asyncio
from collections import Counter, deque
from concurrent.futures import Future
from threading import Lock


class InspectionTurns:
    """Lends workers to owners in turn."""

    def __init__(self, num_workers: int) -> None:
        self._num_free = num_workers
        self._num_held: Counter[str] = Counter()
        self._waiting: dict[str, deque[Future[None]]] = {}
        self._num_served = 0
        self._last_served: dict[str, int] = {}
        """By owner that has or awaits a worker: the number of the turn that it got last."""
        self._lock = Lock()

    async def acquire(self, owner: str) -> None:
        """Waits until the owner may use a worker. Call `release` when the worker is free again."""
        turn: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(turn)
            self._lend()
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            if not turn.cancelled():  # the turn came at the moment when the caller was cancelled
                self.release(owner)
            raise

    def release(self, owner: str) -> None:
        """Takes a worker back from an owner, and lends it to the next."""
        with self._lock:
            self._num_held[owner] -= 1
            self._num_free += 1
            self._lend()
            if not self._num_held[owner] and owner not in self._waiting:
                self._last_served.pop(owner, None)
                del self._num_held[owner]

    def _lend(self) -> None:
        """Gives free workers to those who wait. Skips callers that were cancelled."""
        while self._num_free and self._waiting:
            owner = min(self._waiting, key=lambda each: (self._num_held[each], self._last_served.get(each, 0)))
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.set_running_or_notify_cancel():
                continue
            self._num_served += 1
            self._last_served[owner] = self._num_served
            self._num_held[owner] += 1
            self._num_free -= 1
            turn.set_result(None)
