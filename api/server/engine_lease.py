"""Makes an engine's process known to gateways by a lease in the database.

    claim ──► serve ──► renew, again and again ──(draining, and nothing runs)──► end the process in good order
                                └──(SIGTERM)──► draining

Owns the lease of this process's engine. Never serves a request.
Invariant: an engine whose id was taken by another one ends. An engine that cannot reach the database goes on to serve.
"""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from graftwork.engine.fleet.members import version_of
from graftwork.platform.database import Database
from graftwork.platform.errors import GraftworkError, InternalFailure, Unavailable
from graftwork.platform.replicas.lease import Replica, ReplicaLeases, ReplicaState
from graftwork.platform.settings.settings import Settings

if TYPE_CHECKING:  # the gateway loads this module without torch
    from graftwork.engine.rpc.server import EngineServer, Membership

_log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 10
"""How often a lease is renewed in its length."""
_RETRY_S = 1.0
_SEPARATORS = re.compile(r"[^A-Za-z0-9._-]+")
_DRAIN_LOOK_S = 1.0
"""Seconds between two looks at an engine that drains. Gateways read the leases as often."""
_IDLE_LOOKS = 2
"""How many renewals in a row find a draining engine idle before it ends. Gateways learn of a drain within a second."""


def leased(settings: Settings, listen: str) -> "Membership":
    """Returns a membership that keeps a lease in the database of `settings`, as long as the engine serves."""

    def of(server: "EngineServer") -> AbstractAsyncContextManager[None]:
        return _kept_lease(settings, listen, server)

    return of


def advertised_address(settings: Settings, listen: str) -> str:
    """Returns the address at which gateways reach an engine that listens at `listen`."""
    if settings.advertise is not None:
        return settings.advertise
    host, separator, port = listen.rpartition(":")
    if listen.startswith("unix:") or not separator:
        return listen
    return f"{socket.getfqdn()}:{port}" if host in ("0.0.0.0", "[::]", "*") else listen


@asynccontextmanager
async def _kept_lease(settings: Settings, listen: str, server: "EngineServer") -> AsyncGenerator[None]:
    database = Database(settings.resolved_database_url, settings.lease_s)
    address = advertised_address(settings, listen)
    replica_id = settings.replica_id or _SEPARATORS.sub("-", f"{socket.gethostname()}-{address}")
    keeper = _LeaseKeeper(database, server, settings)
    keeping = asyncio.create_task(keeper.keep(replica_id, address), name="engine-lease")
    keeping.add_done_callback(keeper.note_end)
    try:
        yield
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await keeper.drain()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await keeper.end()
        await database.close()


class _LeaseKeeper:
    """Takes and renews one lease. Ends the engine if the lease is lost, or when it has drained."""

    def __init__(self, database: Database, server: "EngineServer", settings: Settings) -> None:
        self._database = database
        self._leases = ReplicaLeases(database, settings.lease_s)
        self._server = server
        self._settings = settings
        self._interval_s = settings.lease_s / RENEWALS_PER_LEASE
        self._replica: Replica | None = None
        self._idle_looks = 0

    async def keep(self, replica_id: str, address: str) -> None:
        try:
            replica = await self._take(replica_id, address)
            has_drained = False
            while not has_drained:
                await asyncio.sleep(self._interval_s)
                has_drained = await self._has_drained(replica)
            self._replica = replace(replica, state=ReplicaState.GONE)
        except GraftworkError as error:
            _log.critical("engine_refused", extra={"replica": replica_id, "reason": error.message})
            self._server.fail(error)
        else:
            _log.info("engine_drained", extra={"replica": replica_id})
            self._server.must_end.set()

    def note_end(self, keeping: "asyncio.Task[None]") -> None:
        """Ends the engine if the task that keeps its lease has failed: gateways would never find the engine again."""
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            _log.critical("engine_lease_failed", exc_info=error)
            self._server.fail(InternalFailure(f"The engine's lease cannot be kept: {error}"))

    async def drain(self) -> None:
        """Lets gateways use other engines and the running requests end here, after a signal has asked for the end.

        Returns when the engine has nothing to do, at a second signal, or when the longest request must have ended. If
        the database does not answer, gateways cannot know that the engine drains, and it waits for `drain_grace_s` only.
        """
        replica = self._replica
        if replica is None or replica.state is ReplicaState.GONE or self._server.death is not None:
            return
        limit_s = self._settings.request_timeout_s
        try:
            await self._leases.drain(replica.replica_id, replica.epoch)
        except Unavailable:
            limit_s = self._settings.drain_grace_s
        except GraftworkError:  # another engine has the id, or the lease was lost long ago
            return
        _log.info("engine_drains", extra={"replica": replica.replica_id})
        self._idle_looks = 0
        with suppress(TimeoutError, GraftworkError):
            async with asyncio.timeout(limit_s):
                while not self._server.must_end_now.is_set() and not await self._has_drained(replica):
                    await wait_at_most(self._server.must_end_now, min(self._interval_s, _DRAIN_LOOK_S))

    async def end(self) -> None:
        if self._replica is not None:
            with suppress(Unavailable):
                await self._leases.end(self._replica)

    async def _take(self, replica_id: str, address: str) -> Replica:
        """Takes the lease, as soon as the database answers and a gateway has made its tables. Raises Conflict if the fleet refuses the engine."""
        served = version_of(self._server.description)
        while True:
            try:
                await self._database.check_schema()
                generation = self._settings.generation
                replica = self._replica or await self._leases.claim(replica_id, address, generation)
                self._replica = replica
                self._server.join(replica.epoch, generation)
                await self._leases.note_ready(replica, served)
            except Unavailable as error:
                _log.warning("engine_without_lease", extra={"replica": replica_id, "reason": error.message})
                await asyncio.sleep(_RETRY_S)
            else:
                _log.info("engine_has_lease", extra={"replica": replica_id, "epoch": replica.epoch})
                self._replica = replace(replica, served=served, state=ReplicaState.READY)
                return self._replica

    async def _has_drained(self, replica: Replica) -> bool:
        """Renews the lease. Returns whether the engine is draining and has nothing to do."""
        try:
            state = await self._leases.renew(replica)
        except Unavailable as error:
            _log.warning("lease_not_renewed", extra={"replica": replica.replica_id, "reason": error.message})
            return False
        load = self._server.load
        is_idle = state is ReplicaState.DRAINING and load.running_requests + load.waiting_requests == 0
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        return self._idle_looks >= _IDLE_LOOKS


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Waits until an event is set, for `seconds` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
