"""Measures how long a device works on each step, also if the host launches steps before the earlier ones have ended."""

from collections import deque

from graftwork.platform.clock import Clock


class StepTimer:
    """Measures the seconds of each step. Steps end in the order in which they began.

    A device computes one step after another. So the work on a step starts when the host begins it, or when the step
    before it ends, whichever is later.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at: deque[float] = deque()
        """When each step began that has not ended, the oldest first."""
        self._last_ended_at = float("-inf")

    def begin(self, *, follows: bool = False) -> None:
        """Records that the host begins a step now.

        If it `follows` the step before without a rest, the host's work since the end of that step counts as its own.
        """
        self._began_at.append(float("-inf") if follows else self._clock.monotonic())

    def end(self) -> float:
        """Records that the oldest step ends now, also if it has failed. Returns the seconds that it took."""
        started_at = max(self._began_at.popleft(), self._last_ended_at)
        self._last_ended_at = self._clock.monotonic()
        return self._last_ended_at - started_at
