"""Connects a gateway to its engine or to the engines of its fleet, and shows them to operators.

    connect_engine       the engine or the fleet that the settings name
    check_key_transport  whether keys of KV files would travel in the clear
    static_fleet         engines at fixed addresses
    leased_fleet         all engines that have a lease in the database
    replica_directory    what `GET /v1/admin/replicas` lists, for a fleet and for a single engine

Owns no engine. Never starts a process.
"""

import asyncio
import logging
from collections.abc import Sequence

from graftwork.api.server.engine_probe import engine_connection
from graftwork.api.server.served_model import shown_model_name
from graftwork.api.server.tls import engine_tls
from graftwork.engine.core.client import EngineClient
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.demand import EngineDemand
from graftwork.engine.fleet.members import Connect, MemberAddress, MemberSource, StaticMembers
from graftwork.engine.fleet.replicas import ReplicaDirectory, ReplicaReading
from graftwork.engine.rpc.engine_token import is_local
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest, NotFound, Unavailable
from graftwork.platform.replica_collector import ReplicaFigures
from graftwork.platform.replicas.demand import EngineDemands
from graftwork.platform.replicas.lease import ReplicaLeases, ReplicaState
from graftwork.platform.settings.settings import Settings

_log = logging.getLogger(__name__)

_READS_PER_OFFER = 5
"""How often the list of engines is read, once a second, for each look whether somebody starts one when it is asked for."""
ONLY_REPLICA = "engine-0"
"""The id of the engine of a gateway that has no fleet."""


def connect_engine(settings: Settings, database: Database) -> EngineClient:
    """Returns a client of the engine at the settings' address, or of all engines of the fleet that they name.

    Raises InvalidRequest if keys of KV files would travel in the clear, or certificates are incomplete.
    """
    check_key_transport(settings)
    connect, clock = engine_connection(settings), SystemClock()
    if settings.fleet == "leases":
        leases = ReplicaLeases(database, settings.lease_s)
        demands = EngineDemands(database, shown_model_name(settings), settings.lease_s)
        return leased_fleet(connect, clock, settings, leases, demands)
    if len(settings.engine_addresses) == 1:
        return connect(settings.engine_addresses[0])
    return static_fleet(connect, clock, settings)


def check_key_transport(settings: Settings) -> None:
    """Raises InvalidRequest if the keys of KV files would travel to an engine in the clear.

    They may travel by a Unix socket, by a loopback address, or encrypted. Engines with leases may be on any machine.
    """
    if not settings.encrypt_kv_files or engine_tls(settings) is not None:
        return
    if settings.fleet == "leases":
        where = "engines with leases, which may be on other machines"
    elif remote := [address for address in settings.engine_addresses if not is_local(address)]:
        where = ", ".join(remote)
    else:
        return
    raise InvalidRequest(
        f"With encrypt_kv_files, the keys of tenants' KV files would travel in the clear to {where}: give this gateway "
        "and its engines certificates with engine_tls_ca, engine_tls_cert and engine_tls_key, or switch "
        "encrypt_kv_files off.",
        param="encrypt_kv_files",
    )


class LeasedMembers:
    """Implements MemberSource with the leases in the database."""

    def __init__(self, leases: ReplicaLeases) -> None:
        self._leases = leases

    async def addresses(self) -> Sequence[MemberAddress]:
        return [
            MemberAddress(one.replica_id, one.address, one.epoch, one.state is ReplicaState.DRAINING)
            for one in await self._leases.present()
        ]


def static_fleet(connect: Connect, clock: Clock, settings: Settings) -> FleetClient:
    """Returns a client of the engines at the settings' addresses. Only this gateway knows which of them drain."""
    fleet = FleetClient(StaticMembers(settings.engine_addresses), connect, clock, silence_s=settings.engine_silence_s)
    fleet.replicas.grace_s = settings.drain_grace_s
    return fleet


class OfferedEngines:
    """Lets the requests of a gateway wait for an engine, as long as somebody offers to start one. Implements MemberSource
    with that of the engines.
    """

    def __init__(self, members: MemberSource, demands: EngineDemands, clock: Clock) -> None:
        self._members = members
        self._demands = demands
        self._demand = EngineDemand(clock)
        self._demand.on_demand = self._ask
        self._asking: asyncio.Task[None] | None = None
        self._reads = 0
        self.fleet: FleetClient | None = None

    async def addresses(self) -> Sequence[MemberAddress]:
        found = await self._members.addresses()
        if self.fleet is not None and self._reads % _READS_PER_OFFER == 0:
            self.fleet.demand = self._demand if await self._demands.is_offered() else None
        self._reads += 1
        return found

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_once(), name="ask-for-an-engine")

    async def _ask_once(self) -> None:
        try:
            await self._demands.ask()
        except Unavailable as error:
            _log.warning("engine_not_asked_for", extra={"reason": error.message})


def leased_fleet(
    connect: Connect, clock: Clock, settings: Settings, leases: ReplicaLeases, demands: EngineDemands
) -> FleetClient:
    """Returns a client of all engines that have a lease. All gateways that share the database know which drain, and
    whether an engine starts when `demands` asks for it.
    """

    async def note_drain(replica_id: str) -> None:
        await leases.drain(replica_id)

    source = OfferedEngines(LeasedMembers(leases), demands, clock)
    source.fleet = fleet = FleetClient(source, connect, clock, silence_s=settings.engine_silence_s)
    fleet.replicas.grace_s = settings.drain_grace_s
    fleet.replicas.on_drain = note_drain
    return fleet


class OnlyReplica:
    """Implements ReplicaDirectory for a gateway with one engine."""

    def __init__(self, engine: EngineClient, address: str) -> None:
        self._engine = engine
        self._address = address

    async def list(self) -> list[ReplicaReading]:
        try:
            stats = await self._engine.stats()
        except Unavailable as error:
            return [ReplicaReading(ONLY_REPLICA, self._address, None, "absent", error.message, None)]
        return [ReplicaReading(ONLY_REPLICA, self._address, None, "ready", None, stats)]

    def figures(self) -> Sequence[ReplicaFigures]:
        """Returns nothing: the metrics of a single engine have no labels."""
        return []

    async def drain(self, replica_id: str) -> ReplicaReading:
        """Raises Conflict: the only engine cannot drain. Raises NotFound for another id."""
        if replica_id != ONLY_REPLICA:
            raise NotFound("The replica does not exist: GET /v1/admin/replicas lists them.", code="replica_not_found")
        raise Conflict(
            "This is the only engine, nothing could take over from it: stop the server.", code="only_replica"
        )


def replica_directory(engine: EngineClient, address: str) -> ReplicaDirectory:
    """Returns the engines behind `engine`, for operators."""
    return engine.replicas if isinstance(engine, FleetClient) else OnlyReplica(engine, address)
