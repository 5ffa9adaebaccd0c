"""Starts and ends the engines of `serve --replicas N --max-replicas M` by their load.

    reports of the engines ──(each second)──► Autoscaler ──► LocalFleet.add, or a drain

Owns the starts under way. The rule is in engine/fleet/autoscaler.py.
Invariant: one engine at a time drains, and it never is the last one that is ready.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from graftwork.api.deps.resources import repeating
from graftwork.api.server.local_fleet import LocalFleet
from graftwork.engine.fleet.autoscaler import Autoscaler, ScalingLimits
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.scaling_signals import SignalReader
from graftwork.platform.clock import Clock
from graftwork.platform.errors import Conflict, GraftworkError

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class LocalScaling:
    """Scales the engines of one server."""

    def __init__(self, local: LocalFleet, fleet: FleetClient, limits: ScalingLimits, clock: Clock) -> None:
        self._local, self._fleet, self._clock = local, fleet, clock
        self._scaler = Autoscaler(limits, len(local.running), clock.monotonic())
        self._signals = SignalReader()
        self._starts: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Scales until the end of the block."""
        try:
            async with repeating(self.look, _LOOK_EVERY_S, "scaling the engines"):
                yield
        finally:
            for start in self._starts:
                start.cancel()
            await asyncio.gather(*self._starts, return_exceptions=True)

    async def look(self) -> None:
        """Looks at all engines once, and starts or drains what the load asks for."""
        members = self._fleet.membership.members
        former = self._scaler.target
        wanted = self._scaler.note(
            self._clock.monotonic(), self._signals.read(self._clock.monotonic(), members.values())
        )
        if wanted != former:
            _log.info("fleet_scales", extra={"from": former, "to": wanted})
        surplus = len(self._local.running) - wanted
        for _ in range(-surplus):
            start = asyncio.create_task(self._add(), name="engine-start")
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)
        if surplus > 0 and not any(member.is_draining for member in members.values()):
            await self._drain_one()

    async def _add(self) -> None:
        try:
            await self._local.add()
            await self._fleet.membership.refresh()
        except GraftworkError as error:  # the next look tries again
            _log.error("engine_not_added", extra={"reason": error.message})

    async def _drain_one(self) -> None:
        """Drains the engine with the fewest requests."""
        ready = [one for one in self._fleet.membership.ready if one.replica_id in self._local.running]
        if len(ready) < 2:
            return
        least = min(ready, key=lambda one: (one.num_requests, len(one.load.resident_adapters), one.replica_id))
        self._local.end_after_drain(least.replica_id)  # first: an idle engine has drained at once
        try:
            await self._fleet.replicas.drain(least.replica_id)
        except Conflict:  # another one was lost meanwhile
            self._local.running.add(least.replica_id)
