"""Defines how an engine shows other threads and processes that its loop advances, and what load it has.

`LoopProgress` belongs to the engine: the loop's thread writes it, and any thread may read it. `FreezeLimits` says how
long an engine may stay silent or stand still before others count it as frozen. Never ends a request or a process.
"""

import math
from dataclasses import dataclass

from graftwork.engine.core.load import NO_LOAD, EngineLoad
from graftwork.platform.clock import Clock

_LOAD_EVERY_S = 0.1


class LoopProgress:
    """Records when the engine loop last advanced.

    The loop advances when it begins to handle a message, at each part of a step, and at each layer of a forward pass. A
    loop that waits for a message is not stalled, however long it waits.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._advanced_at: float | None = None
        """When the loop last advanced, on the monotonic clock; None while the loop waits for a message."""
        self._load_at = float("-inf")
        self._load = NO_LOAD

    def advance(self) -> None:
        """Records that the loop works, and has just advanced. Only the loop's thread calls this."""
        self._advanced_at = self._clock.monotonic()

    def rest(self) -> None:
        """Records that the loop waits for a message. Only the loop's thread calls this."""
        self._advanced_at = None

    @property
    def load(self) -> EngineLoad:
        """The latest load that the loop has published."""
        return self._load

    @property
    def load_age_s(self) -> float:
        """The seconds since it was published; 0 before the first one."""
        age_s = self._clock.monotonic() - self._load_at
        return age_s if math.isfinite(age_s) else 0.0

    @property
    def wants_load(self) -> bool:
        """Whether the published load is old. Only the loop's thread asks this, after `advance`."""
        return self._advanced_at is not None and self._advanced_at - self._load_at >= _LOAD_EVERY_S

    def publish(self, load: EngineLoad) -> None:
        """Publishes the load of this moment. Only the loop's thread calls this."""
        self._load = load
        self._load_at = self._advanced_at or self._load_at

    @property
    def stalled_s(self) -> float:
        """The seconds since the loop last advanced; 0 while it waits for a message."""
        advanced_at = self._advanced_at  # read once, because the loop's thread may change it
        return 0.0 if advanced_at is None else max(self._clock.monotonic() - advanced_at, 0.0)


@dataclass(frozen=True, slots=True)
class FreezeLimits:
    """How long an engine may do nothing before a gateway counts it as frozen, in seconds."""

    silence_s: float = 5.0
    """The longest time for which the engine's process may not answer pings. Its gRPC library answers them on threads of
    its own, so a process that computes answers them, and a stopped one does not.
    """
    step_s: float = 120.0
    """The longest time for which the engine's loop may work without advancing by a layer of a step."""


DEFAULT_FREEZE_LIMITS = FreezeLimits()
