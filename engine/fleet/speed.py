"""Finds engines that live and work much more slowly than their peers, or whose steps do not advance.

    reports of an engine ──► seconds of a step, smoothed ──► slowness = its seconds / the median of all engines

Owns the measured times. Never talks to an engine. An engine without requests is not measured: its slowness then fades,
so that it gets requests again and shows how fast it is.
"""

from dataclasses import dataclass

from graftwork.engine.core.load import EngineLoad

TOLERANCE = 3.0
"""How many times slower than its peers an engine may be without losing requests. Steps differ by their batches."""
STALLED_AFTER_S = 1.0
"""Seconds without a step, with requests in the batch, after which an engine gets no new requests."""
_KEPT = 0.7
_FADE_S = 10.0
"""The seconds in which the excess of an idle engine's time over the median halves."""


@dataclass(slots=True)
class _Pace:
    """The speed of one engine."""

    load: EngineLoad
    read_at: float
    step_s: float | None = None
    advanced_at: float = 0.0
    """When its steps last advanced, or it had nothing to do."""


class SpeedMonitor:
    """Compares the speed of the engines of a fleet. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def note(self, replica_id: str, load: EngineLoad, now: float) -> None:
        """Records what an engine reported just now."""
        pace = self._paces.get(replica_id)
        if pace is None or load.steps < pace.load.steps:
            self._paces[replica_id] = _Pace(load, now, advanced_at=now)
            return
        steps, seconds = load.steps - pace.load.steps, now - pace.read_at
        was_busy = pace.load.running_requests > 0 and load.running_requests > 0
        if was_busy and steps:
            step_s = (now - pace.advanced_at) / steps
            pace.step_s = step_s if pace.step_s is None else _KEPT * pace.step_s + (1 - _KEPT) * step_s
        elif not was_busy and pace.step_s is not None:
            usual_s = self._usual_s() or pace.step_s
            pace.step_s = usual_s + (pace.step_s - usual_s) * 0.5 ** (seconds / _FADE_S)
        if steps or not was_busy:
            pace.advanced_at = now
        pace.load, pace.read_at = load, now

    def forget(self, replica_id: str) -> None:
        """Forgets an engine, because it is gone or has started again."""
        self._paces.pop(replica_id, None)

    def slowness(self, replica_id: str) -> float:
        """Returns how many times slower than the median an engine is, if that is more than TOLERANCE; else 1."""
        pace, usual_s = self._paces.get(replica_id), self._usual_s()
        if pace is None or pace.step_s is None or not usual_s:
            return 1.0
        factor = pace.step_s / usual_s
        return factor if factor > TOLERANCE else 1.0

    def stalled_s(self, replica_id: str) -> float:
        """Returns for how many seconds an engine has had requests in its batch and made no step, by its own reports."""
        pace = self._paces.get(replica_id)
        return 0.0 if pace is None else pace.read_at - pace.advanced_at

    def _usual_s(self) -> float | None:
        """Returns the lower median of all engines, so that one of two engines can be the slow one."""
        times = sorted(pace.step_s for pace in self._paces.values() if pace.step_s is not None)
        return times[(len(times) - 1) // 2] if times else None
