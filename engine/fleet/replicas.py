"""Shows the engines of a fleet to operators, and drains them.

    drain ──► no new requests ──► running ones end ──(after the grace)──► the rest goes on at other engines ──► on_drained

Owns the drains under way. Never places a request.
Invariant: a drain that has begun ends, also if the operator does not wait for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from graftwork.engine.core.load import NO_LOAD
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.fleet.members import Member, ReplicaCounters, version_of
from graftwork.engine.fleet.membership import Membership
from graftwork.engine.fleet.scaling_signals import expected_first_token_s
from graftwork.platform.errors import Conflict, NotFound, Unavailable
from graftwork.platform.replica_collector import ReplicaFigures

_log = logging.getLogger(__name__)

DRAIN_GRACE_S = 30.0
"""Seconds that the requests of a draining engine have to end there."""
_LOOK_EVERY_S = 1.0
"""Seconds between two looks for an engine that could take over from a draining one."""


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One engine of a fleet as this gateway sees it."""

    replica_id: str
    address: str
    epoch: int | None
    status: str
    """`ready`, `draining` or `absent`."""
    problem: str | None
    """Why an absent engine gets no requests."""
    stats: EngineStats | None
    """The engine's figures; None if it does not answer."""
    generation: int | None = None
    """The engine's generation; None without a fleet, and if the engine has not described itself."""
    version: str | None = None
    """The version of Graftwork that the engine runs; None as above."""
    fingerprint: str | None = None


class ReplicaDirectory(Protocol):
    """The engines that a gateway uses, for operators."""

    async def list(self) -> list[ReplicaReading]:
        """Returns all engines, by id, with the figures of those that answer."""
        ...

    def figures(self) -> Sequence[ReplicaFigures]:
        """Returns what is known of all engines without asking them, for metrics."""
        ...

    async def drain(self, replica_id: str) -> ReplicaReading:
        """Begins to drain an engine, and returns it. A second call changes nothing.

        Raises NotFound for an unknown id, and Conflict if no other engine could take new requests.
        """
        ...


async def _do_nothing(replica_id: str) -> None:
    """Does nothing: who has started an engine at a fixed address ends it."""


class Replicas:
    """Implements ReplicaDirectory for the engines of a fleet."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.grace_s = DRAIN_GRACE_S
        """Seconds that the requests of a draining engine have to end there."""
        self.may_drain_last = False
        """Whether the last engine may drain: then requests wait while another one starts."""
        self.on_drain: Callable[[str], Awaitable[None]] = _do_nothing
        """Is called with the id of an engine that begins to drain, to tell other gateways."""
        self.on_drained: Callable[[str], Awaitable[None]] = _do_nothing
        """Is called with the id of an engine that has drained, to end it or to start it again."""
        self._drains: dict[str, asyncio.Task[None]] = {}
        membership.on_draining = self.follow

    async def list(self) -> list[ReplicaReading]:
        """Returns all engines of the fleet, by id, with the figures of those that answer."""
        await self._membership.start()
        members = sorted(self._membership.members.values(), key=lambda member: member.replica_id)
        return [*await asyncio.gather(*map(_reading, members))]

    async def drain(self, replica_id: str) -> ReplicaReading:
        """Begins to drain an engine, and returns it. A second call changes nothing.

        Raises NotFound for an unknown id, and Conflict if no other engine could take new requests.
        """
        member = await self._member(replica_id)
        if not member.is_draining:
            if not self.may_drain_last and not [other for other in self._membership.ready if other is not member]:
                raise Conflict(
                    "No other engine is ready to take over from it: start one first, or stop the server.",
                    code="only_replica",
                )
            member.is_draining = True
            await self.on_drain(replica_id)
        self.follow(member)
        return await _reading(member)

    def figures(self) -> Sequence[ReplicaFigures]:
        """Returns what is known of all engines, without asking them. Counters go on over the starts of an engine."""
        self._membership.read_reports()
        members, counters = self._membership.members, self._membership.counters
        return [_figures(self._membership, members.get(one), one) for one in sorted({*members, *counters})]

    def follow(self, member: Member) -> None:
        """Waits in the background until a draining engine has drained. A second call changes nothing."""
        if member.replica_id not in self._drains or self._drains[member.replica_id].done():
            task = asyncio.create_task(self._drain(member), name=f"drain-{member.replica_id}")
            self._drains[member.replica_id] = task

    async def close(self) -> None:
        """Gives the drains up that are under way."""
        for task in self._drains.values():
            task.cancel()
        await asyncio.gather(*self._drains.values(), return_exceptions=True)

    async def _drain(self, member: Member) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await member.idle.wait()
        while member.num_requests and not self._has_heir(member):  # the last engine with its weights ends what it began
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await member.idle.wait()
        if member.num_requests:
            _log.info("replica_hands_over", extra={"replica": member.replica_id, "requests": member.num_requests})
            member.hand_over()
            await member.idle.wait()
        _log.info("replica_drained", extra={"replica": member.replica_id})
        await self.on_drained(member.replica_id)

    def _has_heir(self, member: Member) -> bool:
        """Returns whether a ready engine could go on with a draining engine's requests: one with the same weights and
        version. An engine that no longer answers has lost its requests already.
        """
        if member.description is None:
            return True
        served = version_of(member.description)
        return any(other is not member and other.serves(served) for other in self._membership.ready)

    async def _member(self, replica_id: str) -> Member:
        await self._membership.start()
        member = self._membership.members.get(replica_id)
        if member is None:
            raise NotFound("The replica does not exist: GET /v1/admin/replicas lists them.", code="replica_not_found")
        return member


def _figures(membership: Membership, member: Member | None, replica_id: str) -> ReplicaFigures:
    load = NO_LOAD if member is None else member.load
    counted = membership.counters.get(replica_id, ReplicaCounters())
    slowness = membership.speeds.slowness(replica_id)
    return ReplicaFigures(
        replica_id,
        is_ready=member is not None and member.is_ready,
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_tokens=load.queued_tokens,
        free_pages=load.free_pages,
        slowness=slowness,
        first_token_s=0.0 if member is None else expected_first_token_s(member, slowness),
        requests=counted.requests,
        hand_overs=counted.hand_overs,
        hedges=counted.hedges,
    )


async def _reading(member: Member) -> ReplicaReading:
    stats, problem, described = None, member.problem, member.description
    try:
        stats = await member.client.stats()
    except Unavailable as error:
        problem = problem or error.message
    status = "ready" if problem is None else "absent"
    return ReplicaReading(
        member.replica_id,
        member.place.address,
        member.place.epoch,
        "draining" if member.is_draining else status,
        problem,
        stats,
        None if described is None else described.generation,
        None if described is None else described.version,
        None if described is None else described.fingerprint,
    )
