"""Simulated time: what is to happen, in the order in which it does.

Owns the clock of one simulated world, which moves from event to event and never in between.
"""

import heapq
from collections.abc import Callable
from itertools import count

from graftwork.platform.clock import ManualClock

Action = Callable[[], None]


class Timeline:
    """Events by time; those of one time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.clock = ManualClock(0.0)
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = count()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.clock.monotonic()

    def after(self, seconds: float, action: Action) -> None:
        """Plan an event."""
        heapq.heappush(self._events, (self.now + max(seconds, 0.0), next(self._numbers), action))

    def run(self, until: float | None = None) -> None:
        """Let everything happen, and all that follows from it; or only what is to happen up to the time `until`."""
        while self._events and (until is None or self._events[0][0] <= until):
            at, _, action = heapq.heappop(self._events)
            self.clock.advance(max(at - self.now, 0.0))
            action()
