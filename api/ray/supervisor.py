"""Supervises a fleet whose engines Ray places: starts them, replaces those of a former generation, and ends surplus ones.

    Supervisor (a detached actor) ──► one EngineActor for each engine ──► its EngineKeeper ──► the engine's process
         └──(each second)──► leases in the database: which engines are ready

Ray's Serve is not used: its proxy and handles would stand in the path of tokens, its autoscaler knows only requests, and
its roll-outs end a replica after a fixed time, whether or not it has drained.
Owns the number of engines and their generation, in Ray's own key-value store, which outlives this actor. Gateways never
ask it, and need neither this actor nor Ray.
Invariant: each engine that the supervisor stops has a ready engine beside it, or more are ready than wanted.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from graftwork.api.ray.engine_keeper import KeeperState
from graftwork.api.ray.engine_spec import EngineSpec
from graftwork.engine.fleet.autoscaler import Autoscaler, ScalingLimits
from graftwork.engine.fleet.membership import Membership
from graftwork.engine.fleet.rollout import PresentEngine, changes, free_id
from graftwork.engine.fleet.scaling_signals import SignalReader
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.replicas.demand import EngineDemands
from graftwork.platform.replicas.lease import Replica, ReplicaLeases, ReplicaState

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a fleet should be."""

    spec: EngineSpec
    replicas: int
    surge: int = 1
    """Engines more than `replicas` that may exist during a roll-out."""
    most: int | None = None
    """With a number, the supervisor itself chooses how many engines there are: from `replicas` to this."""

    def to_json(self) -> str:
        own = {"replicas": self.replicas, "surge": self.surge, "most": self.most}
        return json.dumps({"spec": self.spec.to_json(), **own})

    @classmethod
    def from_json(cls, text: str) -> "Wanted":
        fields = json.loads(text)
        return cls(EngineSpec.from_json(fields["spec"]), fields["replicas"], fields["surge"], fields["most"])


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine of a fleet for operators."""

    replica_id: str
    generation: int
    state: str
    """`waiting` (for a machine), `starting`, `ready`, `draining` or `ending`."""
    address: str | None
    process_id: int | None
    starts: int
    problem: str


class EngineActors(Protocol):
    """The actors of a fleet's engines. None of its methods waits until an actor runs."""

    async def known(self) -> dict[str, int]:
        """Returns the generation of each engine that has an actor, by replica id."""
        ...

    async def start(self, replica_id: str, spec: EngineSpec) -> None: ...

    async def state(self, replica_id: str) -> KeeperState | None:
        """Returns the state of an engine's keeper; None while its actor has no machine, or starts again."""
        ...

    async def stop(self, replica_id: str) -> None:
        """Lets an engine drain and end."""
        ...

    async def forget(self, replica_id: str) -> None:
        """Ends the actor of an engine that has ended."""
        ...


class Supervisor:
    """Supervises one fleet. Knows nothing of Ray: `actors` does."""

    def __init__(
        self,
        name: str,
        wanted: Wanted,
        actors: EngineActors,
        leases: ReplicaLeases,
        clock: Clock,
        membership: Membership | None = None,
        demands: EngineDemands | None = None,
    ) -> None:
        """`membership` follows the load of the engines; without it, the fleet does not scale by itself. Gateways ask in
        `demands` for the first engine of a fleet that may have none.
        """
        self._demands = demands
        self.name = name
        self._clock = clock
        self._membership = membership
        self._scaler: Autoscaler | None = None
        self._signals = SignalReader()
        self.wanted = wanted
        self._actors = actors
        self._leases = leases
        self._stopping: set[str] = set()
        self._status: list[EngineStatus] = []
        self.is_empty = False
        """Whether the fleet should have no engines, and has none."""

    def set_replicas(self, replicas: int, most: int | None = None) -> None:
        """Changes how many engines the fleet should have: `replicas`, or with `most`, from `replicas` to `most`."""
        self.is_empty = False
        self._scaler = None
        self.wanted = replace(self.wanted, replicas=replicas, most=most)

    def upgrade(self, spec: EngineSpec) -> int:
        """Begins to replace all engines by those of the next generation. Returns its number."""
        self.wanted = replace(self.wanted, spec=self.wanted.spec.next_generation(spec))
        return self.wanted.spec.generation

    def status(self) -> list[EngineStatus]:
        """Returns all engines, by id, as they were at the last look."""
        return self._status

    async def run(self) -> None:
        """Keeps the fleet as it should be. Never returns."""
        while True:
            try:
                if self._membership is not None:
                    await self._membership.start()
                await self.look()
            except GraftworkError as error:  # such as a database that does not answer: all engines stay as they are
                _log.warning("fleet_not_read", extra={"fleet": self.name, "reason": error.message})
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks at all engines once, and starts and stops what is needed."""
        prefix = f"{self.name}-"
        leased = {one.replica_id: one for one in await self._leases.present() if one.replica_id.startswith(prefix)}
        self._follow_generation(leased.values())
        known = await self._actors.known()
        states = dict(zip(known, await asyncio.gather(*map(self._actors.state, known)), strict=True))
        for replica_id, state in states.items():
            if state is not None and state.has_ended:
                await self._actors.forget(replica_id)
                self._stopping.discard(replica_id)
                del known[replica_id]
        await self._adopt(leased, known)
        present = [self._present(replica_id, generation, leased) for replica_id, generation in known.items()]
        self._status = [self._status_of(one, leased.get(one.replica_id), states.get(one.replica_id)) for one in present]
        wanted = self.wanted
        number = self._number(present, await self._is_asked())
        await self._change(replace(wanted, replicas=number), present, taken=[*known, *leased])
        self.is_empty = not present and wanted is self.wanted and not wanted.replicas

    async def _is_asked(self) -> bool:
        """Returns whether a gateway asks for an engine. Offers one, if the fleet may have none."""
        if self._demands is None or self.wanted.most is None or self.wanted.replicas:
            return False
        await self._demands.offer()
        return await self._demands.was_asked()

    def _number(self, present: Sequence[PresentEngine], is_asked: bool) -> int:
        """Returns how many engines the fleet should have now."""
        wanted, now = self.wanted, self._clock.monotonic()
        if wanted.most is None or self._membership is None:
            return wanted.replicas
        if self._scaler is None:
            number = sum(not one.is_stopping for one in present)
            settings = wanted.spec.settings
            limits = ScalingLimits(
                wanted.replicas,
                wanted.most,
                first_token_s=settings.scale_first_token_s,
                down_after_s=settings.scale_down_after_s,
            )
            self._scaler = Autoscaler(limits, number, now)
        former = self._scaler.target
        prefix = f"{self.name}-"
        own = [one for one in self._membership.members.values() if one.replica_id.startswith(prefix)]
        number = self._scaler.note(now, self._signals.read(now, own, int(is_asked)))
        if number != former:
            _log.info("fleet_scales", extra={"fleet": self.name, "from": former, "to": number})
        return number

    def _follow_generation(self, leased: Iterable[Replica]) -> None:
        """Goes on from the newest generation that serves, as after the end of a former Ray."""
        newest = max((one.generation for one in leased if one.state is ReplicaState.READY), default=0)
        spec = self.wanted.spec
        if newest > spec.generation:
            self.wanted = replace(self.wanted, spec=replace(spec, generation=newest))

    async def _adopt(self, leased: dict[str, Replica], known: dict[str, int]) -> None:
        """Gives an actor to each engine that serves and has none, as after the end of a former Ray. The actor finds the
        engine if it is on the same machine; if not, it starts another one under its id, which takes its place.
        """
        for replica_id, replica in leased.items():
            if replica_id in known or replica.state is not ReplicaState.READY:
                continue
            spec = replace(self.wanted.spec, generation=replica.generation)
            await self._actors.start(replica_id, spec)
            known[replica_id] = replica.generation

    def _present(self, replica_id: str, generation: int, leased: dict[str, Replica]) -> PresentEngine:
        lease = leased.get(replica_id)
        is_draining = lease is not None and lease.state is ReplicaState.DRAINING
        is_ready = lease is not None and lease.state is ReplicaState.READY and lease.generation == generation
        return PresentEngine(replica_id, generation, is_ready, is_draining or replica_id in self._stopping)

    async def _change(self, wanted: Wanted, present: Sequence[PresentEngine], taken: list[str]) -> None:
        needed = changes(wanted.replicas, wanted.spec.generation, present, wanted.surge)
        for _ in range(needed.start):
            replica_id = free_id(self.name, taken)
            taken.append(replica_id)
            _log.info("engine_wanted", extra={"replica": replica_id, "generation": wanted.spec.generation})
            await self._actors.start(replica_id, wanted.spec)
        for replica_id in needed.stop:
            _log.info("engine_unwanted", extra={"replica": replica_id})
            self._stopping.add(replica_id)
        for replica_id in self._stopping:
            await self._actors.stop(replica_id)

    def _status_of(self, engine: PresentEngine, lease: Replica | None, state: KeeperState | None) -> EngineStatus:
        shown = "waiting" if state is None else "starting"
        if engine.is_ready:
            shown = "ready"
        if engine.is_stopping:
            shown = "draining" if lease is not None else "ending"
        return EngineStatus(
            engine.replica_id,
            engine.generation,
            shown,
            None if lease is None else lease.address,
            None if state is None else state.process_id,
            0 if state is None else state.starts,
            "" if state is None else state.last_words,
        )


def status_body(status: EngineStatus) -> dict[str, Any]:
    """Converts a status to what the command line shows as JSON."""
    return asdict(status)
