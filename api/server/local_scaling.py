"""Starts and ends the engines of `serve --replicas N --max-replicas M` by their load.

    reports of the engines ──(each second)──► Autoscaler ──► LocalFleet.add, or a drain
    a request without an engine ──(at once)──┘

Owns the starts under way. The rule is in engine/fleet/autoscaler.py.
Invariant: one engine at a time drains. The last one that is ready drains only if the least number of engines is 0.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager

from graftwork.api.deps.background import repeating
from graftwork.api.server.local_fleet import LocalFleet
from graftwork.engine.fleet.autoscaler import Autoscaler, ScalingLimits
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.demand import EngineDemand
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
        self._may_end_all = limits.least == 0
        if self._may_end_all:
            fleet.demand = EngineDemand(clock)
            fleet.demand.on_demand = self._note_demand
            fleet.replicas.may_drain_last = True

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
        members, demand, now = self._fleet.membership.members, self._fleet.demand, self._clock.monotonic()
        former = self._scaler.target
        waiting = 0 if demand is None else demand.take()
        wanted = self._scaler.note(now, self._signals.read(now, members.values(), waiting))
        if wanted != former:
            _log.info("fleet_scales", extra={"from": former, "to": wanted})
        surplus = len(self._local.running) - wanted
        for _ in range(-surplus):
            self._begin(self._add(), "engine-start")
        if surplus > 0 and not any(member.is_draining for member in members.values()):
            await self._drain_one()

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    def _note_demand(self) -> None:
        """Looks at once, if no engine runs or starts: a request waits for one."""
        if not self._local.running and not self._starts:
            self._begin(self.look(), "scaling-by-demand")

    async def _add(self) -> None:
        try:
            await self._local.add()
            await self._fleet.membership.refresh()
        except GraftworkError as error:  # the next look tries again
            _log.error("engine_not_added", extra={"reason": error.message})

    async def _drain_one(self) -> None:
        """Drains the engine with the fewest requests."""
        ready = [one for one in self._fleet.membership.ready if one.replica_id in self._local.running]
        if len(ready) < (1 if self._may_end_all else 2):
            return
        least = min(ready, key=lambda one: (one.num_requests, len(one.load.resident_adapters), one.replica_id))
        self._local.end_after_drain(least.replica_id)  # first: an idle engine has drained at once
        try:
            await self._fleet.replicas.drain(least.replica_id)
        except Conflict:  # another one was lost meanwhile
            self._local.running.add(least.replica_id)
