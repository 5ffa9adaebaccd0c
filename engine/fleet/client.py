"""Implements EngineClient over several engines.

    generate ──► choose a member (placer.py) ──► its engine ──► events (a late first token: hedging.py)
                        ▲                              │ engine lost
                        └── prompt + emitted tokens ◄──┘

Keeps no request after its end.
Invariant: the caller of `generate` sees one stream of events, whether or not its engine is lost (see failover.py).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import EngineEvent, TokensGenerated
from graftwork.engine.core.progress import DEFAULT_FREEZE_LIMITS
from graftwork.engine.core.reports import RequestReports
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.fleet.demand import EngineDemand
from graftwork.engine.fleet.failover import MovableRequest, MoveBudget
from graftwork.engine.fleet.hedging import FirstTokenTimes, HedgeBudget, Runner, race
from graftwork.engine.fleet.members import Connect, Member, MemberSource, no_engine
from graftwork.engine.fleet.membership import LOOK_EVERY_S, Membership
from graftwork.engine.fleet.merged_stats import merged_description, merged_stats
from graftwork.engine.fleet.placement import LeastSeconds, PlacementPolicy
from graftwork.engine.fleet.placer import Attempt, Placer
from graftwork.engine.fleet.prefix_map import BlockKeys
from graftwork.engine.fleet.replicas import Replicas
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import IsolationDomain

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_MOVE_WITHIN_S = 10.0
"""Seconds for which a request that has lost its engine waits for another, if there is none."""


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
        self._placer = Placer(self.membership, policy or LeastSeconds(Random()), clock)
        self._budget = MoveBudget()
        self.membership.may_hand_over = self._budget.has_room
        self._hedges = HedgeBudget()
        self._first_tokens = FirstTokenTimes()
        self.demand: EngineDemand | None = None
        """Lets requests wait while an engine starts; None if they are refused while no engine is ready."""

    # ---- requests ---------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one request and yields its events, as EngineClient says.

        If its engine is lost, the request goes on at another one, at most `MAX_MOVES` times. Raises Unavailable if
        there is none, or if too many requests move. With `demand`, a request waits for an engine that starts.
        """
        await self.membership.start()
        movable = MovableRequest(request, self._clock.monotonic())
        keys = BlockKeys(request.domain, request.adapters)
        keys.extend(request.prompt_token_ids)
        self._budget.begin()
        try:
            while True:
                runner = await self._begin(movable, keys)
                attempt = runner.attempt
                events = self._events(movable, keys, runner)
                try:
                    async for event in events:
                        attempt.member.has_spoken = True
                        if attempt.awaits_token and isinstance(event, TokensGenerated):
                            self._note_first_token(attempt)
                        if (shown := movable.take(event, attempt.served)) is not None:
                            yield shown
                    keys.extend(movable.emitted)
                    self.membership.prefixes.note(attempt.member.replica_id, keys.keys)
                    return
                except CapacityContended as error:
                    self._refuse(movable, attempt.member, error)
                except Unavailable as error:
                    self._move(movable, attempt.member, error)
                finally:
                    await events.aclose()
                    await runner.close()
        finally:
            self._budget.end()

    def refuse_early(self, newcomer: Newcomer) -> None:
        """Raises CapacityContended if every engine that is ready would refuse such a request."""
        refusals: list[CapacityContended] = []
        for member in self.membership.ready:
            try:
                member.client.refuse_early(newcomer)
            except CapacityContended as error:
                refusals.append(error)
            else:
                return
        if refusals:
            raise min(refusals, key=lambda error: error.retry_after_s or 0.0)

    async def _begin(self, movable: MovableRequest, keys: BlockKeys) -> Runner:
        """Sends a request to an engine. If there is none, a request that has lost its engine waits for one.

        Raises Unavailable if no engine can take the request.
        """
        if movable.num_moves:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOVE_WITHIN_S):
                    await self.membership.wait_for_ready(movable.served)
        has_waited = self.demand is not None and not self.membership.ready and not movable.num_moves
        if has_waited and self.demand is not None:
            await self.demand.wait(movable.request, self.membership.wait_for_ready)
        able = self._able(movable)
        request = movable.to_send(self._clock.monotonic(), again=has_waited)
        attempt = self._placer.place(movable, keys, able)
        self._placer.bind(request, attempt.member)
        return Runner(attempt, attempt.member, attempt.member.client.generate(request))

    def _events(self, movable: MovableRequest, keys: BlockKeys, first: Runner) -> AsyncGenerator[EngineEvent, None]:
        """Returns the events of one attempt. If its first token is late, a second engine may be asked for it."""
        late_after_s = self._late_after_s(movable, first.attempt)
        if late_after_s is None:
            return first.events

        def begin_second() -> Runner | None:
            return self._begin_second(movable, keys, first.attempt)

        def note_failure(runner: Runner, error: GraftworkError) -> None:
            member = runner.member
            if error.code == ENGINE_UNAVAILABLE and self.membership.members.get(member.replica_id) is member:
                self.membership.note_lost(member, error.message)

        def note_winner(winner: Runner) -> None:
            first.attempt.follow(winner.attempt)
            self._placer.bind(movable.request, winner.member)

        return race(first, late_after_s, begin_second, note_failure, note_winner)

    def _late_after_s(self, movable: MovableRequest, attempt: Attempt) -> float | None:
        """Returns after how many seconds the first token of an attempt is late; None if nobody else is asked for it."""
        request = movable.request
        reads_prompt = request.sampling.prompt_logprobs is not None or request.pooling is not None
        if request.tier is not ServiceTier.PRIORITY or movable.emitted or reads_prompt:
            return None
        self._hedges.begin()
        return self._first_tokens.late_after_s(attempt.expected_s)

    def _begin_second(self, movable: MovableRequest, keys: BlockKeys, first: Attempt) -> Runner | None:
        """Sends a request to a second engine. Returns None if none has nothing to wait for, or if the budget is used."""
        others = [one for one in self.membership.ready if one is not first.member and one.serves(first.served)]
        idle = [one for one in others if not one.load.waiting_requests + one.load.queued_tokens + one.sent_requests]
        if not idle or not self._hedges.take():
            return None
        try:
            request = movable.to_send(self._clock.monotonic(), again=True)
        except DeadlineExceeded:
            return None  # the first engine ends the request
        second = self._placer.place(movable, keys, idle)
        self.membership.count(second.member.replica_id).hedges += 1
        return Runner(second, second.member, second.member.client.generate(request))

    def _note_first_token(self, attempt: Attempt) -> None:
        attempt.awaits_token = False
        self._first_tokens.note(attempt.expected_s, self._clock.monotonic() - attempt.began_at)

    def _able(self, movable: MovableRequest) -> list[Member]:
        """Returns the engines that can take a request. Raises Unavailable if there is none."""
        ready = [one for one in self.membership.ready if one.replica_id not in movable.refused_by]
        able = [one for one in ready if one.serves(movable.served)]
        if ready and not able:
            raise no_engine(f"Its answer was begun with {movable.served}, and no engine with that is left.")
        if not able:
            raise no_engine(self._problems())
        return able

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
            raise no_engine(self._problems()) if self.demand is None else self.demand.ask()
        return merged_description(found[0], found[1:])

    def report_to(self, reports: RequestReports) -> None:
        """Notes the events of all requests that are sent from now on, those of each engine apart."""
        self.membership.report_to(reports)

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
            self._placer.forget((command.domain, command.session))
        if isinstance(own, BaseException):
            raise own
        return own

    def _member_of(self, command: SessionCommand) -> Member:
        answering = self._answering()
        if not answering:
            raise no_engine(self._problems())
        bound = self._placer.replica_of((command.domain, command.session))
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
