"""Runs several engines as children of one server, and tells its gateway where they answer and in which epoch.

    serve --replicas N ──► LocalFleet ──► N × EngineChild: own socket, own KV folder, an Nth of the memory
                            ▲  └──► MemberSource of the FleetClient, and leases in the database
                            └── add, end_after_drain: what scaling by load does (local_scaling.py)

Owns the children. Never sends them a request.
Invariant: each start of a child has an epoch of its own, also while the database does not answer.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from graftwork.api.deps.background import repeating
from graftwork.api.server.engine_lease import RENEWALS_PER_LEASE
from graftwork.api.server.engine_process import DISK_KV_BYTES, KV_FOLDER
from graftwork.api.server.engine_supervisor import EngineChild
from graftwork.engine.core.client import EngineClient
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.members import Connect, MemberAddress, version_of
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, Unavailable
from graftwork.platform.replicas.lease import Replica, ReplicaLeases, ReplicaState
from graftwork.platform.settings.settings import Settings

_log = logging.getLogger(__name__)

_HOST_BYTES = 2**30
"""Bytes of each host tier of one engine, if the settings name none. Together the engines take no more than one."""


class LocalFleet:
    """The engines of `serve --replicas N`. Implements MemberSource."""

    def __init__(
        self, settings: Settings, sockets: Sequence[Path], leases: ReplicaLeases, clock: Clock, prefix: str = ""
    ) -> None:
        """Starts nothing. Each engine answers at one of `sockets`. Their ids begin with `prefix`."""
        self._leases = leases
        self._probes: Mapping[str, EngineClient] = {}
        self._replicas: dict[str, Replica] = {}
        """The present lease of each engine, whether or not the database has it."""
        self._children: dict[str, EngineChild] = {}
        self.running: set[str] = set()
        """The engines that run or start, without those that end after their drain."""
        self._sockets = {f"{prefix}engine-{number}": f"unix:{path}" for number, path in enumerate(sockets)}
        for number, (replica_id, address) in enumerate(self._sockets.items()):
            self._children[replica_id] = EngineChild(
                engine_settings(settings, number), address, clock, next_epoch=partial(self._next_epoch, replica_id)
            )

    async def addresses(self) -> Sequence[MemberAddress]:
        return [MemberAddress(one.replica_id, one.address, one.epoch) for one in self._replicas.values()]

    async def start(
        self, probes: Mapping[str, EngineClient], report: Callable[[float], None], number: int | None = None
    ) -> None:
        """Starts the first `number` engines, and waits until they answer. None starts all.

        `probes` has a client for each address. Raises the error of the first engine that does not start.
        """
        self._probes = probes
        starts = [asyncio.create_task(self._start(one, report)) for one in [*self._children][:number]]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def add(self) -> None:
        """Starts one more engine, and waits until it answers. Does nothing if all run."""
        for replica_id in self._children:
            if replica_id not in self.running and replica_id not in self._replicas:
                await self._start(replica_id, lambda waited_s: None)
                return

    def end_after_drain(self, replica_id: str) -> None:
        """Lets an engine end when it has drained, instead of starting again."""
        self.running.discard(replica_id)

    async def _start(self, replica_id: str, report: Callable[[float], None]) -> None:
        self.running.add(replica_id)
        try:
            await self._children[replica_id].start(self._probes[self._sockets[replica_id]], report)
        except BaseException:
            self.running.discard(replica_id)
            self._replicas.pop(replica_id, None)
            raise

    async def stop(self) -> None:
        """Ends all engines, and gives their leases back."""
        await asyncio.gather(*(child.stop() for child in self._children.values()))
        for replica in self._replicas.values():
            with suppress(Unavailable):
                await self._leases.end(replica)

    async def renew_drained(self, replica_id: str) -> None:
        """Starts an engine that has drained again, or ends it if it is not needed any more."""
        if replica_id in self.running:
            await self._children[replica_id].restart()
            return
        await self._children[replica_id].stop()
        with suppress(Unavailable):
            await self._leases.end(self._replicas[replica_id])
        del self._replicas[replica_id]
        _log.info("engine_ended_by_scaling", extra={"replica": replica_id})

    async def drain(self, replica_id: str) -> None:
        """Tells the gateways that share the database that an engine drains."""
        with suppress(GraftworkError):  # without a lease, only this gateway uses the engine
            await self._leases.drain(replica_id)

    @asynccontextmanager
    async def leased(self, fleet: FleetClient, lease_s: float) -> AsyncGenerator[None]:
        """Keeps the leases of all engines until the end of the block, and drains engines whose leases say so."""
        interval_s = lease_s / RENEWALS_PER_LEASE
        await self._renew(fleet)
        async with repeating(partial(self._renew, fleet), interval_s, "renewing the leases of engines"):
            yield

    async def _renew(self, fleet: FleetClient) -> None:
        for replica in [*self._replicas.values()]:
            member = fleet.membership.members.get(replica.replica_id)
            described = None if member is None else member.description
            try:
                if described is not None and described.epoch == replica.epoch and replica.served is None:
                    await self._leases.note_ready(replica, version_of(described))
                    replica = replace(replica, served=version_of(described), state=ReplicaState.READY)
                    self._replicas[replica.replica_id] = replica
                state = await self._leases.renew(replica)
            except GraftworkError as error:
                extra = {"replica": replica.replica_id, "reason": error.message}
                _log.warning("lease_not_renewed", extra=extra)
                continue
            if state is ReplicaState.DRAINING and member is not None and not member.is_draining:
                with suppress(GraftworkError):  # it is the only engine
                    await fleet.replicas.drain(replica.replica_id)

    async def _next_epoch(self, replica_id: str) -> int:
        """Returns the epoch of a child that is about to start."""
        former, address = self._replicas.get(replica_id), self._sockets[replica_id]
        try:
            replica = await self._leases.claim(replica_id, address)
        except Unavailable as error:
            _log.warning("engine_without_lease", extra={"replica": replica_id, "reason": error.message})
            epoch = 1 if former is None else former.epoch + 1
            replica = Replica(replica_id, epoch, address, None, ReplicaState.STARTING)
        self._replicas[replica_id] = replica
        return replica.epoch


def engine_settings(settings: Settings, number: int) -> Settings:
    """Returns the settings of one of `settings.most_replicas` engines: its own KV folder, and its part of all sizes."""
    kv_folder = settings.kv_dir or settings.data_dir / KV_FOLDER
    engines = settings.most_replicas

    def part(size: int | None, default: int) -> int:
        return (default if size is None else size) // engines

    return replace(
        settings,
        kv_dir=kv_folder if number == 0 else kv_folder.with_name(f"{kv_folder.name}-{number}"),
        memory_share=settings.memory_share / engines,
        device_bytes=None if settings.device_bytes is None else settings.device_bytes // engines,
        lora_pool_bytes=None if settings.lora_pool_bytes is None else settings.lora_pool_bytes // engines,
        host_kv_bytes=part(settings.host_kv_bytes, _HOST_BYTES),
        lora_host_bytes=part(settings.lora_host_bytes, _HOST_BYTES),
        disk_kv_bytes=part(settings.disk_kv_bytes, DISK_KV_BYTES),
    )


def local_fleet_client(local: LocalFleet, connect: Connect, clock: Clock, drain_grace_s: float) -> FleetClient:
    """Returns a client of the engines of `local`, which are started again when they have drained, if they are needed."""
    fleet = FleetClient(local, connect, clock)
    fleet.replicas.grace_s = drain_grace_s
    fleet.replicas.on_drain = local.drain
    fleet.replicas.on_drained = local.renew_drained
    return fleet
