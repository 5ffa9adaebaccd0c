"""Keeps the leases of engines (replicas): which engine answers at which address, and in which epoch.

    claim ──► epoch n, starting ──(note_ready)──► ready ──► draining ──► gone
      └─ the next engine under this id: epoch n + 1. The engine of epoch n is fenced: its next `renew` raises.

Owns the rows of engines. Never talks to an engine. All times are the database's, so the clocks of machines do not
matter.
Invariant: an epoch belongs to one start of one engine. All engines that are ready under one model name and in one
generation have the same weights and the same version. A rolling upgrade starts engines of the next generation beside
the present ones, which then drain.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.errors import Conflict, NotFound
from graftwork.platform.ids import FIRST_GENERATION
from graftwork.platform.replicas import repository
from graftwork.platform.replicas.tables import ReplicaRow

FENCED = "replica_fenced"
"""The code of the error for an engine of an old epoch: another engine has its id now."""
MISMATCH = "replica_mismatch"
"""The code of the error for an engine whose weights or version differ from those of others under the same name and in the
same generation, or whose generation is over.
"""
_FORGOTTEN_AFTER_LEASES = 100
"""After so many lengths of a lease, the row of a silent engine is deleted. A new engine under its id then starts with
the first epoch again."""


class ReplicaState(StrEnum):
    """What an engine does at present."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It finishes its requests, and gets no new ones."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """What an engine serves. Engines of one model name and one generation must agree in all of it."""

    model: str
    """The model's name for clients."""
    fingerprint: str
    """`sha256:…` over the model's files."""
    version: str
    """The version of Graftwork."""

    def __str__(self) -> str:
        return f"{self.fingerprint} of Graftwork {self.version}"


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine as the database knows it."""

    replica_id: str
    epoch: int
    address: str
    """A gRPC target: `unix:/path/engine.sock` or `host:port`."""
    served: ServedVersion | None
    """None while the engine starts."""
    state: ReplicaState
    generation: int = FIRST_GENERATION
    """Counts the upgrades of the model or of Graftwork under one model name. Operators choose it."""


_UNKNOWN = ServedVersion("", "", "")


class ReplicaLeases:
    """Reads and changes the leases of all engines that share a database."""

    def __init__(self, database: Database, lease_s: float, clock: Clock | None = None) -> None:
        """An engine that was not seen for `lease_s` seconds counts as gone. `clock` replaces the database's time in
        tests.
        """
        self._database = database
        self._lease_s = lease_s
        self._clock = clock

    async def claim(self, replica_id: str, address: str, generation: int = FIRST_GENERATION) -> Replica:
        """Gives a starting engine the id `replica_id`, with a new epoch. An earlier engine with this id is fenced."""
        async with self._database.write() as session:
            row = await repository.find_replica(session, replica_id, lock=True)
            epoch = 1 if row is None else row.epoch + 1
            claimed = Replica(replica_id, epoch, address, None, ReplicaState.STARTING, generation)
            await self._put(session, row, claimed)
        return claimed

    async def note_ready(self, replica: Replica, served: ServedVersion) -> None:
        """Stores that a starting engine is ready, and what it serves.

        Raises Conflict if other engines serve the same model name in the same generation with other weights or another
        version, if a newer generation has replaced the engine's own, or, with the code FENCED, if another engine has its
        id now.
        """
        async with self._database.write() as session:
            row = await repository.find_replica(session, replica.replica_id, lock=True)
            _check_epoch(replica, row)
            others = (one for one in await self._present(session) if one.replica_id != replica.replica_id)
            check_same(served, replica.generation, others)
            is_draining = row is not None and row.state == ReplicaState.DRAINING
            state = ReplicaState.DRAINING if is_draining else ReplicaState.READY
            await self._put(session, row, replace(replica, served=served, state=state))

    async def renew(self, replica: Replica) -> ReplicaState:
        """Stores that the engine runs now. Returns its state, which an operator may have changed to draining.

        Raises Conflict with the code FENCED if another engine has its id now.
        """
        async with self._database.write() as session:
            row = await repository.find_replica(session, replica.replica_id, lock=True)
            _check_epoch(replica, row)
            if row is None or row.epoch < replica.epoch:  # it was deleted, or the database was away when it started
                await self._put(session, row, replica)
                return replica.state
            await repository.note_seen(session, replica.replica_id, replica.epoch, self._clock)
            await repository.forget_silent(session, _FORGOTTEN_AFTER_LEASES * self._lease_s, self._clock)
            return ReplicaState(row.state)

    async def end(self, replica: Replica) -> None:
        """Stores that the engine is gone. Does nothing if another engine has its id now."""
        async with self._database.write() as session:
            await repository.put_state(session, replica.replica_id, replica.epoch, ReplicaState.GONE)

    async def drain(self, replica_id: str, epoch: int | None = None) -> Replica:
        """Stores that an engine must drain.

        Raises NotFound if no engine with this id runs, or if it has another epoch than `epoch`; None means any.
        """
        async with self._database.write() as session:
            row = await repository.find_replica(session, replica_id, lock=True)
            present = {one.replica_id for one in await self._present(session)}
            if row is None or replica_id not in present or epoch not in (None, row.epoch):
                raise NotFound(f"No engine {replica_id!r} runs.", code="replica_not_found")
            await repository.put_state(session, replica_id, row.epoch, ReplicaState.DRAINING)
            return _replica(row, ReplicaState.DRAINING)

    async def present(self) -> list[Replica]:
        """Returns the engines that have a lease and are not gone, by id."""
        async with self._database.read() as session:
            return await self._present(session)

    async def _put(self, session: WriteSession, row: ReplicaRow | None, replica: Replica) -> None:
        served = replica.served or _UNKNOWN
        values = {
            "epoch": replica.epoch,
            "address": replica.address,
            "model": served.model,
            "fingerprint": served.fingerprint,
            "version": served.version,
            "state": replica.state,
            "generation": replica.generation,
        }
        if row is None:
            await repository.add_replica(session, ReplicaRow(id=replica.replica_id, seen_at=0.0, **values), self._clock)
        else:
            await repository.put_replica(session, replica.replica_id, values, self._clock)

    async def _present(self, session: ReadSession) -> list[Replica]:
        rows = await repository.list_seen(session, self._lease_s, self._clock)
        return [_replica(row, ReplicaState(row.state)) for row in rows if row.state != ReplicaState.GONE]


def check_same(served: ServedVersion, generation: int, others: Iterable[Replica]) -> None:
    """Raises Conflict, with both fingerprints, if an engine may not serve beside others of the same model name.

    Engines of one generation must have the same weights and version. A generation of which no engine is left may not
    come back beside a newer one. Engines that drain do not count.
    """
    peers: dict[int, tuple[str, ServedVersion]] = {}
    for other in others:
        if other.state is ReplicaState.DRAINING or other.served is None or other.served.model != served.model:
            continue
        peers[other.generation] = other.replica_id, other.served
        if other.generation == generation and other.served != served:
            raise Conflict(
                f"The model {served.model!r} is served by {other.replica_id} with {other.served}; this engine has "
                f"{served}. Give this engine the same model folder and version or another --served-model-name, drain the "
                f"others, or replace them one by one: start this engine with --generation {generation + 1}.",
                code=MISMATCH,
            )
    newest = max(peers, default=generation)
    if newest > generation and generation not in peers:
        replica_id, newer = peers[newest]
        raise Conflict(
            f"The model {served.model!r} is served by {replica_id} in generation {newest} with {newer}; this engine is of "
            f"generation {generation} with {served}. Start it with --generation {newest} and the same model folder and "
            f"version, or with --generation {newest + 1} to replace the others.",
            code=MISMATCH,
        )


def _check_epoch(replica: Replica, row: ReplicaRow | None) -> None:
    """Raises Conflict if the row has a later epoch than the engine."""
    if row is not None and row.epoch > replica.epoch:
        raise Conflict(
            f"This engine is epoch {replica.epoch} of the replica {replica.replica_id}, which has epoch {row.epoch} now: "
            "start this engine again, or give it an id of its own with --replica-id.",
            code=FENCED,
        )


def _replica(row: ReplicaRow, state: ReplicaState) -> Replica:
    served = ServedVersion(row.model, row.fingerprint, row.version) if row.fingerprint else None
    return Replica(row.id, row.epoch, row.address, served, state, row.generation)
