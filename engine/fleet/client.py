"""Implements EngineClient over several engines.

    generate ──► choose a member (placement.py) ──► its engine ──► events
                        ▲                              │ engine lost
                        └── prompt + emitted tokens ◄──┘

Owns which engine has which session. Keeps no request after its end.
Invariant: the caller of `generate` sees one stream of events, whether or not its engine is lost (see failover.py).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.progress import DEFAULT_FREEZE_LIMITS
from graftwork.engine.core.requests import EngineRequest, SessionKey
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.fleet.failover import MovableRequest, MoveBudget
from graftwork.engine.fleet.members import Connect, Member, MemberSource, no_engine, version_of
from graftwork.engine.fleet.membership import LOOK_EVERY_S, Membership
from graftwork.engine.fleet.merged_stats import merged_description, merged_stats
from graftwork.engine.fleet.placement import (
    DEFAULT_PREFILL_TOKEN_S,
    Candidate,
    Demand,
    LeastSeconds,
    PlacementPolicy,
)
from graftwork.engine.fleet.prefix_map import BlockKeys
from graftwork.engine.fleet.replicas import Replicas
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.ids import IsolationDomain

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_MAX_SESSIONS = 100_000
"""The sessions whose engines are remembered. An older one is placed by its prefix."""
_MOVE_WITHIN_S = 10.0
"""Seconds for which a request that has lost its engine waits for another, if there is none."""

_SessionId = tuple[IsolationDomain, SessionKey]


class FleetClient:
    """Implements EngineClient for all engines of a MemberSource. It may be used from one event loop only."""

    def __init__(
        self,
        source: MemberSource,
        connect: Connect,
        clock: Clock,
        *,
        policy: PlacementPolicy | None = None,
        look_every_s: float = LOOK_EVERY_S,
        silence_s: float = DEFAULT_FREEZE_LIMITS.silence_s,
    ) -> None:
        """`policy` places requests: by default by the least estimated time to the first token. `look_every_s` is the
        time between two questions to an engine for its load, and `silence_s` the longest silence that an engine may have.
        """
        self.membership = Membership(source, connect, clock, look_every_s, silence_s)
        self.replicas = Replicas(self.membership)
        """The engines, for operators."""
        self._clock = clock
        self._policy = policy or LeastSeconds(Random())
        self._budget = MoveBudget()
        self.membership.may_hand_over = self._budget.has_room
        self._sessions: OrderedDict[_SessionId, tuple[str, int]] = OrderedDict()
        """By session, the replica that had its last request, and its generation."""

    # ---- requests ---------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one request and yields its events, as EngineClient says.

        If its engine is lost, the request goes on at another one, at most `MAX_MOVES` times. Raises Unavailable if
        there is none, or if too many requests move.
        """
        await self.membership.start()
        movable = MovableRequest(request, self._clock.monotonic())
        keys = BlockKeys(request.domain, request.adapters)
        keys.extend(request.prompt_token_ids)
        self._budget.begin()
        try:
            while True:
                member = await self._member_for(movable, keys)
                served = None if member.description is None else version_of(member.description)
                events = member.client.generate(movable.to_send(self._clock.monotonic()))
                try:
                    async for event in events:
                        member.has_spoken = True
                        if (shown := movable.take(event, served)) is not None:
                            yield shown
                    keys.extend(movable.emitted)
                    self.membership.prefixes.note(member.replica_id, keys.keys)
                    return
                except CapacityContended as error:
                    self._refuse(movable, member, error)
                except Unavailable as error:
                    self._move(movable, member, error)
                finally:
                    member.leave()
                    await events.aclose()
        finally:
            self._budget.end()

    async def _member_for(self, movable: MovableRequest, keys: BlockKeys) -> Member:
        """Chooses the engine for a request. If there is none, a request that has lost its engine waits for one.

        Raises Unavailable if no engine can take the request.
        """
        request = movable.request
        if movable.num_moves:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOVE_WITHIN_S):
                    await self.membership.wait_for_ready(movable.served)
        ready = self._able(movable)
        session_id = None if request.session is None else (request.domain, request.session.session)
        bound, generation = (None, 0) if session_id is None else self._sessions.get(session_id, (None, 0))
        ready = [one for one in ready if one.generation >= generation] or ready  # no session goes back in an upgrade
        page_tokens = ready[0].description.page_tokens if ready[0].description is not None else 1
        num_tokens = len(request.prompt_token_ids) + len(movable.emitted)
        demand = Demand(
            num_tokens,
            pages_for(num_tokens, page_tokens),
            page_tokens,
            needs_adapter=bool(request.adapters),
            key=repr(session_id).encode() if session_id else request.domain,
        )
        candidates = [self._candidate(member, request, keys, bound) for member in ready]
        chosen = self._policy.choose(demand, candidates)
        member = self.membership.members[chosen.replica_id]
        member.enter(max(num_tokens - chosen.cached_tokens, 1))
        self.membership.count(member.replica_id).requests += 1
        self.membership.prefixes.note(member.replica_id, keys.keys)
        if session_id is not None:
            self._bind(session_id, member)
        return member

    def _able(self, movable: MovableRequest) -> list[Member]:
        """Returns the engines that can take a request. Raises Unavailable if there is none."""
        ready = [one for one in self.membership.ready if one.replica_id not in movable.refused_by]
        able = [one for one in ready if one.serves(movable.served)]
        if ready and not able:
            raise no_engine(f"Its answer was begun with {movable.served}, and no engine with that is left.")
        if not able:
            raise no_engine(self._problems())
        return able

    def _candidate(self, member: Member, request: EngineRequest, keys: BlockKeys, bound: str | None) -> Candidate:
        load = member.load
        return Candidate(
            member.replica_id,
            cached_tokens=self.membership.prefixes.cached_tokens(member.replica_id, keys.keys),
            queued_tokens=load.queued_tokens + member.sent_tokens,
            free_pages=load.free_pages,
            requests=load.running_requests + load.waiting_requests + member.sent_requests,
            has_adapters=set(request.adapter_digests) <= set(load.resident_adapters),
            prefill_token_s=load.prefill_token_s or DEFAULT_PREFILL_TOKEN_S,
            slowness=self.membership.speeds.slowness(member.replica_id),
            has_session=member.replica_id == bound,
        )

    def _bind(self, session_id: _SessionId, member: Member) -> None:
        self._sessions[session_id] = member.replica_id, member.generation
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _refuse(self, movable: MovableRequest, member: Member, error: CapacityContended) -> None:
        """Lets a request that an engine has no room for try the others. Raises `error` if there is none left."""
        movable.refused_by.add(member.replica_id)
        if all(one.replica_id in movable.refused_by for one in self.membership.ready):
            raise error

    def _move(self, movable: MovableRequest, member: Member, error: Unavailable) -> None:
        """Lets a request that has lost its engine go on elsewhere. Raises `error` if it may not."""
        if error.code != ENGINE_UNAVAILABLE:
            raise error
        if self.membership.members.get(member.replica_id) is member and not member.is_draining and not member.is_silent:
            self.membership.note_lost(member, error.message)
        if not self._budget.allows(movable, is_late=member.is_silent):
            _log.error(
                "request_not_moved", extra={"request_id": movable.request.request_id, "moves": movable.num_moves}
            )
            raise error
        movable.move(is_late=member.is_silent)
        self.membership.count(member.replica_id).hand_overs += 1
        extra = {"request_id": movable.request.request_id, "replica": member.replica_id}
        _log.warning("request_moves", extra=extra | {"emitted_tokens": len(movable.emitted)})

    def _problems(self) -> str:
        found = {one.replica_id: one.problem or "It is draining." for one in self.membership.members.values()}
        return " ".join(f"{replica_id}: {problem}" for replica_id, problem in found.items()) or "It has no engines."

    # ---- the model, and what engines keep ---------------------------------------------------------------------

    async def describe(self) -> EngineDescription:
        """Returns what all engines that answer can serve together, with the weights of the newest generation.

        Raises Unavailable if none answers.
        """
        await self.membership.start()
        found = [one.description for one in self.membership.members.values() if one.description is not None]
        found.sort(key=lambda description: -description.generation)
        if not found:
            raise no_engine(self._problems())
        return merged_description(found[0], found[1:])

    async def stalled_s(self) -> float:
        return min(await self._ask_all(lambda member: member.client.stalled_s()))

    async def stats(self) -> EngineStats:
        """Returns the figures of all engines that answer, added up."""
        return merged_stats(await self._ask_all(lambda member: member.client.stats()))

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        """Sends a command to the engine that had the session's last request, or else the longest prefix of it.

        CLOSE and CHANGE go to all engines, because a session that has moved has pages at several.
        """
        await self.membership.start()
        member = self._member_of(command)
        if command.verb not in (SessionVerb.CLOSE, SessionVerb.CHANGE):
            return await member.client.run_session_command(command)
        others = [one for one in self._answering() if one is not member]
        own, *_ = await asyncio.gather(
            member.client.run_session_command(command),
            *(one.client.run_session_command(command) for one in others),
            return_exceptions=True,
        )
        if command.verb is SessionVerb.CLOSE:
            self._sessions.pop((command.domain, command.session), None)
        if isinstance(own, BaseException):
            raise own
        return own

    def _member_of(self, command: SessionCommand) -> Member:
        answering = self._answering()
        if not answering:
            raise no_engine(self._problems())
        bound, _ = self._sessions.get((command.domain, command.session), (None, 0))
        for member in answering:
            if member.replica_id == bound:
                return member
        keys = BlockKeys(command.domain, command.adapters)
        keys.extend(command.token_ids)
        cached = self.membership.prefixes.cached_tokens
        return max(answering, key=lambda member: cached(member.replica_id, keys.keys))

    async def probe_adapter(self, digest: str) -> None:
        """Lets one engine check an adapter. All have the same weights, so its answer holds for all."""
        await self.membership.start()
        ready, lost = self.membership.ready, no_engine(self._problems())
        for member in ready:
            try:
                return await member.client.probe_adapter(digest)
            except Unavailable as error:
                lost = error
        raise lost

    async def forget_adapter(self, digest: str) -> None:
        """Tells all engines that answer. The others have nothing of the adapter when they have started again."""
        await self._ask_all(lambda member: member.client.forget_adapter(digest))

    async def forget_domain(self, domain: IsolationDomain) -> None:
        """Tells all engines. Raises Unavailable if one does not answer: it may keep files. Then call this again."""
        await self.membership.start()
        members = [*self.membership.members.values()]
        if not members:
            raise no_engine(self._problems())
        answers = await asyncio.gather(*(one.client.forget_domain(domain) for one in members), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    async def close(self) -> None:
        await self.replicas.close()
        await self.membership.close()

    def _answering(self) -> list[Member]:
        return [member for member in self.membership.members.values() if member.description is not None]

    async def _ask_all(self, ask: Callable[[Member], Awaitable[_Answer]]) -> list[_Answer]:
        """Asks all engines that answer, and returns their answers. Raises Unavailable if none answers."""
        await self.membership.start()
        answers = await asyncio.gather(*map(ask, self._answering()), return_exceptions=True)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if found:
            return found
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        raise no_engine(self._problems())
