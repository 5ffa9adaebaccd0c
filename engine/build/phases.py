"""Measures how long each phase of an engine's start takes, for the log and for `/metrics`.

Owns the seconds. A phase within another one counts for itself only.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from graftwork.engine.core.stats import EngineStats
from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)


class StartPhases:
    """The phases of one start. Each has a field `start_<name>_s` in EngineStats."""

    def __init__(self, clock: Clock, process_s: float = 0.0) -> None:
        """`process_s` is the age of the process now: the time of its imports."""
        self._clock = clock
        self.seconds = {"imports": process_s}
        self._inner_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to a phase."""
        started_at, outer_s = self._clock.monotonic(), self._inner_s
        self._inner_s = 0.0
        try:
            yield
        finally:
            passed_s = self._clock.monotonic() - started_at
            own_s = passed_s - self._inner_s
            self.seconds[name] = self.seconds.get(name, 0.0) + own_s
            self._inner_s = outer_s + passed_s

    def report(self) -> None:
        """Logs the seconds of all phases."""
        rounded = {f"{name}_s": round(seconds, 3) for name, seconds in self.seconds.items()}
        _log.info("engine_start", extra=rounded | {"total_s": round(sum(self.seconds.values()), 3)})

    def complete(self, stats: EngineStats) -> EngineStats:
        """Returns `stats` with the seconds of all phases."""
        values = {f"start_{name}_s": seconds for name, seconds in self.seconds.items()}
        return replace(stats, **values)  # type: ignore[arg-type]
