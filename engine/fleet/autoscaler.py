"""Decides how many engines a fleet should have, by what its engines report. Computes only: never starts an engine.

    engines needed = the largest of
        seconds of queued uncached prompt tokens     / those that one engine may have
        KV that running requests hold, in engines    / share of its KV that one engine may use
        time that loading adapters takes, in engines / share of its time that one engine may spend so
        ready engines × 95th percentile of the estimated seconds to the first token / the target

Fast up, slow down: more engines are wanted after `up_after_s` of need, fewer only if for `down_after_s` nothing needed
them, one at a time.
Owns the needs of the last minutes. All times are seconds of one monotonic clock, given by the caller.
Invariant: after the target has risen it does not fall for `down_after_s`, and it never leaves its bounds.
Source: target tracking with a stabilization window, as in Kubernetes' horizontal autoscaler.
"""

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """The bounds of a fleet, and what it promises."""

    least: int
    """Engines that always run, 0 or more. With 0, a model without requests has no engine."""
    most: int
    first_token_s: float = 2.0
    """The target of the estimated seconds to the first token, without the prompt's own computation."""
    queue_share: float = 0.5
    """The part of `first_token_s` that the queued prompt tokens of one engine may need."""
    kv_share: float = 0.8
    """The share of its KV pages that the running requests of one engine may hold."""
    load_share: float = 0.25
    """The share of its time that one engine may spend on loading adapters."""
    up_after_s: float = 3.0
    down_after_s: float = 300.0
    """Seconds for which nothing has needed an engine before it ends."""
    down_every_s: float = 30.0
    """Seconds between the ends of two engines."""
    margin: float = 0.1
    """A need that exceeds the present engines by less than this part starts none."""


@dataclass(frozen=True, slots=True)
class EngineSignals:
    """What one ready engine reports."""

    queued_s: float = 0.0
    """Seconds that it needs to compute the uncached prompt tokens that wait there."""
    kv_use: float = 0.0
    """The share of its KV pages that running requests hold, 0 to 1."""
    adapter_load_share: float = 0.0
    """The share of the last second in which it loaded adapters that requests missed, 0 or more."""
    first_token_s: float = 0.0
    """The estimated seconds to the first token of a new short request there."""
    requests: int = 0
    """Requests that wait or run there; at least 1 if it has worked since the last look."""


@dataclass(frozen=True, slots=True)
class FleetSignals:
    """What is known of a fleet at one moment."""

    engines: tuple[EngineSignals, ...] = ()
    waiting_requests: int = 0
    """Requests that wait at the gateway, because no engine is ready."""


class Autoscaler:
    """Keeps the wanted number of engines of one fleet."""

    def __init__(self, limits: ScalingLimits, present: int, now: float) -> None:
        """`present` is the number of engines at the start."""
        if not 0 <= limits.least <= limits.most or limits.most < 1:
            raise ValueError("0 <= least <= most and 1 <= most must hold")
        self._limits = limits
        self.target = min(max(present, limits.least), limits.most)
        """The wanted number of engines."""
        self._needs: deque[tuple[float, int]] = deque([(now, self.target)])
        """The engines that were needed, by time: one entry a look, of the last `down_after_s`."""
        self._estimates: deque[tuple[float, float]] = deque()
        self._short_since: float | None = None
        self._busy_at = now
        self._shrunk_at = now

    def note(self, now: float, signals: FleetSignals) -> int:
        """Takes the signals of this moment. Returns the wanted number of engines."""
        limits = self._limits
        if signals.waiting_requests or any(one.requests for one in signals.engines):
            self._busy_at = now
        need = min(max(self._needed(now, signals), limits.least), limits.most)
        self._needs.append((now, need))
        while self._needs[0][0] < now - limits.down_after_s:
            self._needs.popleft()
        if need > self.target:
            self._short_since = now if self._short_since is None else self._short_since
            if now - self._short_since >= limits.up_after_s or not signals.engines:
                self.target, self._short_since = need, None
        else:
            self._short_since = None
            self._shrink(now)
        return self.target

    def _shrink(self, now: float) -> None:
        """Wants one engine less if nothing has needed the last one for long enough."""
        limits = self._limits
        needed = max(need for _, need in self._needs)
        if needed < self.target and now - self._shrunk_at >= limits.down_every_s:
            self.target, self._shrunk_at = self.target - 1, now

    def _needed(self, now: float, signals: FleetSignals) -> int:
        """Returns how many engines are needed, without bounds."""
        limits, engines = self._limits, signals.engines
        if not engines:
            return max(self.target, 1) if signals.waiting_requests or self.target else 0
        self._estimates.extend((now, one.first_token_s) for one in engines)
        while self._estimates[0][0] < now - _ESTIMATES_S:
            self._estimates.popleft()
        late = _percentile(sorted(seconds for _, seconds in self._estimates)) / limits.first_token_s
        need = max(
            sum(one.queued_s for one in engines) / (limits.queue_share * limits.first_token_s),
            sum(one.kv_use for one in engines) / limits.kv_share,
            sum(one.adapter_load_share for one in engines) / limits.load_share,
            len(engines) * min(late, _MOST_GROWTH) if late > 1.0 else 0.0,
        )
        is_idle = self._busy_at < now
        return max(math.ceil(need / (1.0 + limits.margin)), 0 if is_idle else 1)


_ESTIMATES_S = 30.0
"""The seconds over which the percentile of estimates is taken."""
_MOST_GROWTH = 2.0
"""Estimates alone double a fleet at most: they say that it is too small, and not by how much."""


def _percentile(values: list[float]) -> float:
    """Returns the 95th percentile of sorted values."""
    return values[max(math.ceil(0.95 * len(values)) - 1, 0)]
