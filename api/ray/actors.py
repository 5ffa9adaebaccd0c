"""Runs a fleet's supervisor and the keepers of its engines as actors of Ray. The only module that imports Ray.

    RayFleet ──► SupervisorActor (detached) ──► EngineActor (detached, one for each engine)

All actors are started again by Ray when their process or their machine is lost. They are in the namespace `graftwork`.
Never passes a request or a token.
"""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from graftwork.api.ray.engine_keeper import EngineKeeper, KeeperState
from graftwork.api.ray.engine_spec import EngineSpec
from graftwork.api.ray.supervisor import EngineStatus, Supervisor, Wanted
from graftwork.api.server.engine_probe import engine_connection
from graftwork.api.server.fleets import LeasedMembers
from graftwork.api.server.served_model import shown_model_name
from graftwork.engine.fleet.membership import Membership
from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest, NotFound, Unavailable
from graftwork.platform.replicas.demand import EngineDemands
from graftwork.platform.replicas.lease import ReplicaLeases

NAMESPACE = "graftwork"
_ANSWER_WITHIN_S = 2.0
"""Seconds for an answer of an engine's actor. One that takes longer waits for a machine, or starts again."""
_CALL_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.5
_LOAD_EVERY_S = 0.25
_RESTARTS = -1
"""Without a limit."""


class EngineActor:
    """Keeps one engine on the machine that Ray has chosen."""

    def __init__(self, replica_id: str, spec_json: str) -> None:
        import ray

        self._keeper = EngineKeeper(replica_id, EngineSpec.from_json(spec_json), ray.util.get_node_ip_address())

    def state(self) -> KeeperState:
        return self._keeper.state()

    def stop(self) -> None:
        self._keeper.stop()


class RayEngineActors:
    """Implements EngineActors with actors of the Ray that this process is connected to."""

    def __init__(self, fleet: str) -> None:
        self._prefix = f"{fleet}/engine/"
        self._handles: dict[str, Any] = {}

    async def known(self) -> dict[str, int]:
        import ray

        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if _is_ours(one)]
        found: dict[str, int] = {}
        for name in names:
            if name.startswith(self._prefix):
                generation, _, replica_id = name.removeprefix(self._prefix).partition("/")
                found[replica_id] = int(generation)
                if replica_id not in self._handles:
                    with suppress(ValueError):  # it has ended meanwhile
                        self._handles[replica_id] = ray.get_actor(name, namespace=NAMESPACE)
        return found

    async def start(self, replica_id: str, spec: EngineSpec) -> None:
        import ray

        self._handles[replica_id] = (
            ray.remote(EngineActor)
            .options(
                name=f"{self._prefix}{spec.generation}/{replica_id}",
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=_RESTARTS,
                num_cpus=spec.num_cpus,
                num_gpus=spec.num_gpus,
            )
            .remote(replica_id, spec.to_json())
        )

    async def state(self, replica_id: str) -> KeeperState | None:
        return cast(KeeperState | None, await self._ask(replica_id, "state"))

    async def stop(self, replica_id: str) -> None:
        await self._ask(replica_id, "stop")

    async def forget(self, replica_id: str) -> None:
        import ray

        if (handle := self._handles.pop(replica_id, None)) is not None:
            ray.kill(handle, no_restart=True)

    async def _ask(self, replica_id: str, method: str) -> object:
        import ray

        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                return await getattr(self._handles[replica_id], method).remote()
        except (TimeoutError, KeyError, ray.exceptions.RayActorError):
            return None


class SupervisorActor:
    """Runs a Supervisor in a thread of its own. After a restart it goes on with what is in Ray's key-value store."""

    def __init__(self, name: str, wanted_json: str) -> None:
        wanted = Wanted.from_json(_KeyValueStore().get(name) or wanted_json)
        settings = wanted.spec.settings
        self._name = name
        self._database = Database(settings.resolved_database_url, settings.lease_s)
        leases, clock = ReplicaLeases(self._database, settings.lease_s), SystemClock()
        membership = Membership(LeasedMembers(leases), engine_connection(settings), clock, _LOAD_EVERY_S)
        demands = EngineDemands(self._database, shown_model_name(settings), settings.lease_s)
        self._supervisor = Supervisor(name, wanted, RayEngineActors(name), leases, clock, membership, demands)
        self._store()
        threading.Thread(target=lambda: asyncio.run(self._run()), name="fleet-supervisor", daemon=True).start()

    async def _run(self) -> None:
        await self._database.upgrade_to_head()
        await self._supervisor.run()

    def status(self) -> list[EngineStatus]:
        return self._supervisor.status()

    def is_empty(self) -> bool:
        return self._supervisor.is_empty

    def scale(self, replicas: int, most: int | None = None) -> None:
        self._supervisor.set_replicas(replicas, most)
        self._store()

    def upgrade(self, spec_json: str) -> int:
        generation = self._supervisor.upgrade(EngineSpec.from_json(spec_json))
        self._store()
        return generation

    def _store(self) -> None:
        _KeyValueStore().put(self._name, self._supervisor.wanted.to_json())


class RayFleet:
    """A fleet for its operator. Connects this process to a Ray cluster."""

    def __init__(self, name: str, address: str | None) -> None:
        """`address` is that of the Ray cluster; None takes the one of this machine.

        Raises InvalidRequest if Ray is not installed, and Unavailable if there is no cluster.
        """
        try:
            import ray
        except ImportError as error:
            raise InvalidRequest("Ray is not installed: pip install 'graftwork[ray]'.") from error
        self._name = name
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, logging_level="warning", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise Unavailable(
                f"No Ray cluster answers at {address or 'this machine'}: start one with `ray start --head`.",
                code="no_ray",
                retry_after_s=1.0,
            ) from error

    def start(self, wanted: Wanted) -> None:
        """Starts the fleet's supervisor. Raises Conflict if it runs already."""
        import ray

        if self._found() is not None:
            raise Conflict(f"The fleet {self._name!r} runs already: scale or upgrade it.", code="fleet_runs")
        actor = (
            ray.remote(SupervisorActor)
            .options(
                name=self._supervisor_name, namespace=NAMESPACE, lifetime="detached", max_restarts=_RESTARTS, num_cpus=0
            )
            .remote(self._name, wanted.to_json())
        )
        ray.get(actor.status.remote(), timeout=_CALL_WITHIN_S)

    def status(self) -> Sequence[EngineStatus]:
        return cast(list[EngineStatus], self._call("status"))

    def scale(self, replicas: int, most: int | None = None) -> None:
        """Changes how many engines there are: `replicas`, or with `most`, from `replicas` to `most`, by their load."""
        self._call("scale", replicas, most)

    def upgrade(self, spec: EngineSpec) -> int:
        """Begins a rolling upgrade. Returns the number of the new generation."""
        return cast(int, self._call("upgrade", spec.to_json()))

    def stop(self) -> None:
        """Lets all engines drain and end, and ends the supervisor. Returns when no engine is left."""
        import ray

        self.scale(0)
        pause = threading.Event()
        while not self._call("is_empty"):
            pause.wait(_LOOK_EVERY_S)
        ray.kill(self._supervisor(), no_restart=True)
        _KeyValueStore().delete(self._name)

    @property
    def _supervisor_name(self) -> str:
        return f"{self._name}/supervisor"

    def _call(self, method: str, *arguments: object) -> object:
        import ray

        return ray.get(getattr(self._supervisor(), method).remote(*arguments), timeout=_CALL_WITHIN_S)

    def _supervisor(self) -> Any:
        found = self._found()
        if found is None:
            raise NotFound(f"No fleet {self._name!r} runs: start it with `graftwork fleet start`.", code="no_fleet")
        return found

    def _found(self) -> Any:
        import ray

        try:
            return ray.get_actor(self._supervisor_name, namespace=NAMESPACE)
        except ValueError:
            return None


def _is_ours(actor: dict[str, str]) -> bool:
    return actor["namespace"] == NAMESPACE


class _KeyValueStore:
    """The key-value store of Ray's head, which is in Redis where Ray is set up to survive its head."""

    def put(self, name: str, value: str) -> None:
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(self._key(name), value.encode(), overwrite=True)

    def get(self, name: str) -> str | None:
        from ray.experimental import internal_kv

        value = internal_kv._internal_kv_get(self._key(name))
        return None if value is None else value.decode()

    def delete(self, name: str) -> None:
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(self._key(name))

    def _key(self, name: str) -> bytes:
        return f"graftwork/fleet/{name}".encode()
