"""Refuses requests whose deadlines cannot be met on the thread that receives them, before the engine loop sees them.

The loop takes messages only between two steps, so its refusal would come when the running step has ended. Here a request is
held against the snapshot that the loop has published after its latest step, and against the requests that have come since.
The rule is that of the loop (engine/scheduler/arrival.py).

Owns the requests that have been received since the snapshot. Waits for nothing and takes no lock: the snapshot is
immutable, and the loop replaces it as a whole. `receive` is for one thread, and `publish` for that of the loop.
Invariant: a request that is refused here has changed nothing.
"""

import math
from collections import deque

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.scheduler.arrival import Arrival, QueueSnapshot, check_arrival, is_sure
from graftwork.engine.scheduler.first_token import Received
from graftwork.platform.clock import Clock

_WANTED_S = 60.0
"""For so many seconds after the last request with a deadline, the loop publishes snapshots."""
_EVERY_S = 0.02
"""While steps run, a snapshot is published no more often than this, because making one takes time in proportion to the queue."""


class Arrivals:
    """Decides about requests that arrive, by the latest snapshot of the engine's loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._snapshot: QueueSnapshot | None = None
        self._wanted_until = self._published_at = -math.inf
        self._num_received = 0
        self._added: deque[tuple[int, Arrival]] = deque()
        """The requests that the snapshot does not know, with their numbers; the oldest first."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether requests with deadlines come."""
        return self._clock.monotonic() < self._wanted_until

    @property
    def is_old(self) -> bool:
        """Whether the published snapshot should be replaced after this step. Only the loop's thread asks this."""
        return self._clock.monotonic() - self._published_at >= _EVERY_S

    @property
    def snapshot(self) -> QueueSnapshot | None:
        """The latest snapshot; None if none is wanted."""
        return self._snapshot

    def publish(self, snapshot: QueueSnapshot | None) -> None:
        """Takes the state of the engine after a step; None if it is not wanted. Only the loop's thread calls this."""
        self._snapshot = snapshot
        self._published_at = -math.inf if snapshot is None else self._clock.monotonic()

    def receive(self, request: EngineRequest) -> Received:
        """Returns what the engine loop must know of a request that has just come.

        Raises CapacityContended or Unavailable if its deadline cannot be met (see `check_arrival`). Decides nothing if no
        snapshot is there yet, or if too much depends on what of the prompt is cached.
        """
        now, deadline_s, snapshot = self._clock.monotonic(), request.deadline_s, self._snapshot
        if deadline_s is not None:
            self._wanted_until = now + _WANTED_S
        if snapshot is None:
            self._added.clear()
            self._num_received += 1
            return Received(now, self._num_received)
        while self._added and self._added[0][0] <= snapshot.num_received:
            self._added.popleft()
        arrival = Arrival.of(request, snapshot.guess_uncached(request))
        is_valid = deadline_s is not None and 0 < deadline_s < math.inf and not request.emitted_token_ids
        expected = None
        if deadline_s is not None and is_valid and is_sure(snapshot, arrival, deadline_s):
            expected = check_arrival(snapshot, arrival, deadline_s, [one for _, one in self._added])
        self._num_received += 1
        self._added.append((self._num_received, arrival))
        return Received(now, self._num_received, expected, arrival.uncached_tokens)
