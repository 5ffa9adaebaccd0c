"""How fast the engine gets through its requests, measured, to tell a refused client when to come back."""

from graftwork.platform.clock import Clock

_SMOOTHING = 0.2
_SHORTEST_S = 0.05
_LONGEST_S = 60.0


class Pace:
    """An exponential average of the time between two finished requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_finished_at: float | None = None
        self._seconds_between = 1.0

    def finished_one(self) -> None:
        """Note that a request ended and left its place."""
        now = self._clock.monotonic()
        if self._last_finished_at is not None:
            gap = now - self._last_finished_at
            self._seconds_between += _SMOOTHING * (gap - self._seconds_between)
        self._last_finished_at = now

    def seconds_until_room(self) -> float:
        """When one place in the full queue is likely to be free."""
        return min(max(self._seconds_between, _SHORTEST_S), _LONGEST_S)
