"""From a session and what is new to a running turn, and the turns that run in this process.

Owns the tasks of running turns; ends them when the process shuts down.
Never answers a route: the service does.
Invariant: nothing reaches the engine that was not reserved with the quota and begun in the store.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from graftwork.engine.core.requests import ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityAbsent, InvalidRequest
from graftwork.platform.ids import RequestId, SessionId, TurnId, new_id
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.sessions.core.events import EventFeed
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.lease import Pause
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionSettings
from graftwork.sessions.core.transcript import TurnEncoder
from graftwork.sessions.generation.constraints import AnswerPlan, AnswerPlanner
from graftwork.sessions.generation.generator import GenerationRequest, Generator
from graftwork.sessions.generation.usage import Accounting, Charge, RequestAccount, kv_limits
from graftwork.sessions.store.event_log import EventLog
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.turns.event_reader import EventReader
from graftwork.sessions.turns.handle import RunningTurn
from graftwork.sessions.turns.kv import SessionKv
from graftwork.sessions.turns.runner import NO_HINTS, ToolHints, TurnPlan, TurnRunner, TurnSurroundings
from graftwork.sessions.turns.settings import (
    answer_demands,
    check_vocabulary,
    read_sampling,
    turn_budget,
)

_log = logging.getLogger("graftwork.sessions")


@dataclass(frozen=True, slots=True)
class LauncherResources:
    """What turns are made with."""

    generator: Generator
    accounting: Accounting
    encoder: TurnEncoder | None
    """None for a model without a chat template."""
    clock: Clock
    pepper: bytes
    heartbeat_s: float
    planner: AnswerPlanner = field(default_factory=AnswerPlanner)
    """For the same tool call format as the generator's."""
    pause: Pause = asyncio.sleep
    """How the event log waits for a group, and for a database that is away."""


Launched = tuple[TurnRunner, asyncio.Task[None]]
"""Whoever runs a turn, and the task that does."""


class TurnLauncher:
    """Starts turns, and knows those that run here."""

    def __init__(self, resources: LauncherResources, store: TurnStore) -> None:
        self._resources = resources
        self._store = store
        self._log = EventLog(store.append, resources.clock, resources.pause)
        self._runners: dict[SessionId, TurnRunner] = {}
        self._tasks: dict[TurnId, asyncio.Task[None]] = {}
        self._starting: set[TurnId] = set()
        self._launches: dict[asyncio.Task[Launched], SessionId] = {}
        self._is_closing = False
        self.kv = SessionKv(resources.generator.engine, resources.pepper, resources.generator.public_prefixes)

    @property
    def turn_ids(self) -> frozenset[TurnId]:
        """The turns that run here, or are about to."""
        return frozenset((*self._tasks, *self._starting))

    def runner_of(self, session_id: SessionId) -> TurnRunner | None:
        """Whoever runs the session's turn here."""
        return self._runners.get(session_id)

    def feed_of(self, session_id: SessionId) -> EventFeed | None:
        """The feed of the session's turn, while it runs here."""
        runner = self._runners.get(session_id)
        return None if runner is None or runner.feed.is_closed else runner.feed

    async def launch(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        tool_hints: ToolHints = NO_HINTS,
    ) -> Launched:
        """Start a turn; a caller that goes away meanwhile does not stop it half-way.

        Raises ContextLengthExceeded, LimitExceeded, Conflict, CapacityAbsent, in all of which nothing has changed.
        """
        if self._is_closing:
            raise CapacityAbsent("The server is shutting down: try again shortly.", retry_after_s=1.0)
        launch = asyncio.create_task(self._launch(principal, session, new_items, settings, tool_hints))
        self._launches[launch] = session.session_id
        launch.add_done_callback(self._forget_launch)
        return await asyncio.shield(launch)

    async def plan_answer(self, settings: SessionSettings) -> AnswerPlan:
        """How answers under these settings are made and read. Raises InvalidRequest for what cannot be served."""
        return await asyncio.to_thread(self._resources.planner.plan, answer_demands(settings))

    async def cancel(self, session_id: SessionId, turn_id: TurnId | None = None) -> bool:
        """Cancel the turn that runs here, that one if it is named, and wait for its end; False if it does not run.

        One that is just being launched is waited for: its row may say already that it runs.
        """
        if launches := [launch for launch, launched in self._launches.items() if launched == session_id]:
            await asyncio.wait(launches)
        runner = self._runners.get(session_id)
        if runner is not None and turn_id not in (None, runner.turn.turn_id):
            return False
        task = None if runner is None else self._tasks.get(runner.turn.turn_id)
        if runner is None or task is None:
            return False
        runner.cancel()
        await asyncio.wait({task})
        return True

    async def close(self) -> None:
        """Fail the turns that run, store that, and start no more."""
        self._is_closing = True
        if self._launches:
            await asyncio.wait(self._launches)
        for runner in self._runners.values():
            runner.shut_down()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _launch(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        tool_hints: ToolHints,
    ) -> Launched:
        turn_id = TurnId(new_id("turn"))
        plan, expected_tokens = await self._plan(principal, session, new_items, settings, turn_id)
        accounting = self._resources.accounting
        quota = await accounting.quota_of(principal.tenant_id)
        request = replace(plan.request, kv_limits=kv_limits(quota))
        plan = replace(plan, request=request, tool_hints=tool_hints)
        account = await accounting.open(_charge(plan), quota, expected_tokens)
        runner = None
        self._starting.add(turn_id)
        try:
            runner = await self._begin(plan, turn_id, account)
            return runner, self._start(runner)
        finally:
            self._starting.discard(turn_id)
            if runner is None:
                await account.settle(None, "failed")

    async def _plan(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        turn_id: TurnId,
    ) -> tuple[TurnPlan, int]:
        """What the turn asks of the engine, and how many tokens it is likely to use."""
        answer = await self.plan_answer(settings)
        transcript = await self._store.transcript(principal.scope(), session, settings.opening)
        new_token_ids = await asyncio.to_thread(transcript.encode_next, self._encoder(), settings.opening, new_items)
        prompt = (*transcript.token_ids, *new_token_ids)
        budget = turn_budget(settings, len(prompt), self._resources.generator.description.context_tokens)
        fields = read_sampling(settings.sampling)
        sampling = fields.sampling_params(budget.max_tokens)
        check_vocabulary(sampling, self._resources.generator.description.vocab_size)
        isolation = principal.isolation(self._resources.pepper)
        request = GenerationRequest(
            request_id=RequestId(turn_id),
            prompt_token_ids=prompt,
            sampling=sampling,
            resolved=session.model,
            isolation=isolation,
            stop=tuple(fields.stop or ()),
            weight=principal.weight,
            tier=ServiceTier(principal.capped_tier(ServiceTier.DEFAULT.value)),
            parse_tool_calls=answer.calls_tools,
            parallel_tool_calls=answer.parallel_tool_calls,
            session=SessionUse(SessionKey(session.session_id), len(transcript.token_ids)),
            grammar=answer.grammar,
        )
        plan = TurnPlan(principal, session, transcript, tuple(new_items), new_token_ids, request)
        return plan, len(prompt) + budget.expected_tokens

    async def _begin(self, plan: TurnPlan, turn_id: TurnId, account: RequestAccount) -> TurnRunner:
        resources = self._resources
        noted = made_with(plan.request, self._encoder(), resources.generator.description)
        lease, turn = await self._store.begin(plan.principal.scope(), plan.session, turn_id, plan.new_items, noted)
        surroundings = TurnSurroundings(
            store=self._store,
            log=self._log,
            clock=resources.clock,
            encoder=self._encoder(),
            heartbeat_s=resources.heartbeat_s,
            kv=self.kv,
            pause=resources.pause,
        )
        return TurnRunner(plan, lease, turn, account, surroundings)

    def _start(self, runner: TurnRunner) -> asyncio.Task[None]:
        task = asyncio.create_task(runner.run(self._resources.generator.start(runner.plan.request)))
        turn_id, session_id = runner.turn.turn_id, runner.turn.session_id
        self._runners[session_id] = runner
        self._tasks[turn_id] = task

        def forget(task: asyncio.Task[None]) -> None:
            del self._tasks[turn_id]
            if self._runners.get(session_id) is runner:
                del self._runners[session_id]
            if not task.cancelled() and task.exception() is not None:
                _log.error("the outcome of %s could not be stored", turn_id, exc_info=task.exception())

        task.add_done_callback(forget)
        return task

    def _forget_launch(self, launch: asyncio.Task[Launched]) -> None:
        del self._launches[launch]
        if not launch.cancelled():
            launch.exception()  # whoever asked for it may have gone away

    def _encoder(self) -> TurnEncoder:
        if self._resources.encoder is None:
            raise InvalidRequest("This model has no chat template: it serves no sessions.", code="no_chat_template")
        return self._resources.encoder


class SessionTurns:
    """Turns of all tenants."""

    def __init__(self, store: TurnStore, launcher: TurnLauncher, reader: EventReader) -> None:
        self._store = store
        self._launcher = launcher
        self._reader = reader

    async def launch(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        tool_hints: ToolHints = NO_HINTS,
    ) -> RunningTurn:
        """Start a turn of these items on a session that still is as it is given.

        It runs with that session's model and with these settings; if they open otherwise than the history's tokens do,
        the history is encoded anew. Raises Conflict, ContextLengthExceeded, LimitExceeded.
        """
        runner, task = await self._launcher.launch(principal, session, new_items, settings, tool_hints)
        return RunningTurn(principal.scope(), runner.turn, self._store, self._reader, (runner, task))

    async def find(self, scope: TenantScope, turn_id: TurnId) -> RunningTurn | None:
        """A turn that was started before, here or elsewhere."""
        turn = await self._store.find_turn(scope, turn_id)
        return None if turn is None else RunningTurn(scope, turn, self._store, self._reader)


def _charge(plan: TurnPlan) -> Charge:
    """A chain of responses is no session that its user knows."""
    session = plan.session
    session_id = None if session.kind is SessionKind.RESPONSES else session.session_id
    return Charge(plan.request.request_id, plan.principal, session.model, session_id)


def made_with(request: GenerationRequest, encoder: TurnEncoder, description: EngineDescription) -> Mapping[str, Any]:
    """Weights, template, tokenizer and sampling of one turn. A null seed: the engine drew one and kept it."""
    version = request.resolved.version
    return {
        "base": description.fingerprint,
        "adapter": None if version is None else version.digest,
        "template": encoder.template_digest,
        "tokenizer": encoder.tokenizer_digest,
        "sampling": {**asdict(request.sampling), "stop": list(request.stop)},
    }
