"""Sessions as the routes use them: one verb a route.

Owns the order of things: what is checked, stored and started, and when. The rules are AgentSession's, the rows the
stores', the running turns the launcher's.
Never knows HTTP. Every failure is a `GraftworkError`, and then nothing has changed unless the verb says so.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graftwork.adapters.specs import ResolvedModel
from graftwork.engine.request import SessionMemory, ToolWait
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.ids import CallId, SessionId, TurnId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.principals import Principal, TenantScope
from graftwork.sessions.agent_session import AgentSession, SessionKind, SessionSettings, SessionStatus, ToolOutput
from graftwork.sessions.event_reader import EventReader
from graftwork.sessions.events import SessionEvent
from graftwork.sessions.items import Item, function_call_output, parse_input, parse_output
from graftwork.sessions.running_turn import RunningTurn
from graftwork.sessions.session_kv import History
from graftwork.sessions.session_store import AcceptedOutputs, SessionChange, SessionStore, new_session_id
from graftwork.sessions.session_sweeper import SessionSweeper
from graftwork.sessions.turn_launcher import LauncherResources, TurnLauncher
from graftwork.sessions.turn_runner import NO_HINTS, ToolHints
from graftwork.sessions.turn_settings import NO_OVERRIDES, TurnOverrides, check_metadata, checked_settings
from graftwork.sessions.turn_store import TurnStore

MAX_FORKS = 64
"""Sessions that one fork may make."""
_ABANDONED_AFTER_S = 3600.0
"""When a chain without a response was left behind, and is not just being made or read."""


class ModelResolver(Protocol):
    """What sessions need of the adapter registry."""

    async def resolve(self, scope: TenantScope, model: str, base_name: str) -> ResolvedModel:
        """The weights that `model` stands for now. Raises NotFound."""
        ...


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How long things last, in seconds."""

    owner: str | None = None
    """The name of this process among those that share the database. One that is kept over restarts lets `recover`
    see at once what a crash cut off; None draws a new one, and `recover` sees it when the leases have run out."""
    lease_s: float = 30.0
    """How long a turn counts as running after its process was last heard of."""
    poll_s: float = 0.25
    """Between looks at a turn that runs in another process."""
    retention_s: float = 30 * 86_400.0
    """How long a closed session stays readable if it does not say otherwise."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a session is made from."""

    model: str
    settings: SessionSettings = field(default_factory=SessionSettings)
    metadata: Mapping[str, str] = field(default_factory=dict)
    retention_s: float | None = None
    kind: SessionKind = SessionKind.SESSION


@dataclass(frozen=True, slots=True)
class ToolOutputsAnswer:
    """What sending tool outputs did."""

    session: AgentSession
    outputs: tuple[ToolOutput, ...]
    """What is stored for the calls that were named."""
    missing: tuple[CallId, ...]
    """Calls that are still awaited."""
    turn: RunningTurn | None
    """The turn that goes on with them: started now, or earlier by the same outputs. None while calls are missing."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prefetch found."""

    session: AgentSession
    history_tokens: int
    memory: SessionMemory | None
    """None where no engine answers."""


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """What a PATCH did."""

    session: AgentSession
    given_up_tokens: int
    given_up_bytes: int | None
    """Tokens of history whose KV the new adapter version cannot use."""


class SessionService:
    """Sessions of all tenants, in one process. `recover` first, `close` last."""

    def __init__(
        self,
        database: Database,
        registry: ModelResolver,
        resources: LauncherResources,
        options: SessionOptions | None = None,
    ) -> None:
        options = options or SessionOptions()
        self._registry = registry
        self._gate = resources.gate
        self._clock: Clock = resources.clock
        self._sessions = SessionStore(database, resources.clock, options.retention_s)
        self._sweeper = SessionSweeper(database, resources.clock, options.retention_s)
        self._turns = TurnStore(database, resources.clock, options.owner or new_id("gateway"), options.lease_s)
        self._launcher = TurnLauncher(resources, self._turns)
        self._reader = EventReader(self._turns, self._launcher.feed_of, self._is_running, options.poll_s)
        self.base_name = resources.description.model_name

    async def recover(self) -> int:
        """Fail the turns that a crash left running, and return how many; call it at start-up, and whenever."""
        interrupted = await self._turns.find_interrupted(lambda: self._launcher.turn_ids)
        for scope, session_id, turn_id in interrupted:
            await self._turns.fail_interrupted(scope, session_id, turn_id)
            await self._sessions.remove_unused(scope, session_id)
        return len(interrupted)

    async def sweep(self) -> int:
        """Fail what a crash left running, then remove the sessions whose time is over, and return how many went.

        Chains of responses that a crash left with nothing standing on them go too.
        """
        await self.recover()
        for scope, session_id in await self._sessions.find_unused(self._clock.now() - _ABANDONED_AFTER_S):
            await self._sessions.remove_unused(scope, session_id)
        return await self._sweeper.sweep()

    async def close(self) -> None:
        """Fail the turns that run here, with an event that says so, and start no more."""
        await self._launcher.close()

    async def create(self, principal: Principal, new: NewSession) -> AgentSession:
        """A session pinned to the version that its model stands for now. Raises NotFound, LimitExceeded."""
        settings = checked_settings(new.settings)
        await self._launcher.plan_answer(settings)
        check_metadata(new.metadata)
        model = await self.resolve(principal, new.model)
        now = self._clock.now()
        session = AgentSession(
            session_id=new_session_id(new.kind),
            kind=new.kind,
            tenant_id=principal.tenant_id,
            status=SessionStatus.IDLE,
            model=model,
            settings=settings,
            metadata=new.metadata,
            created_at=now,
            updated_at=now,
            retention_s=new.retention_s,
        )
        await self._sessions.create(principal.scope(), [session], await self._max_sessions(principal, new.kind))
        return session

    async def resolve(self, principal: Principal, model: str) -> ResolvedModel:
        """The weights that `model` stands for now. Raises NotFound."""
        return await self._registry.resolve(principal.scope(), model, self.base_name)

    async def list_sessions(self, principal: Principal, page: PageRequest) -> Page[AgentSession]:
        """One page of the tenant's sessions, by the time they were made."""
        return await self._sessions.list_sessions(principal.scope(), _checked(page))

    async def get(self, principal: Principal, session_id: str) -> AgentSession:
        """A session as it is now. Raises NotFound."""
        return await self._load(principal.scope(), session_id)

    async def get_any(self, principal: Principal, session_id: SessionId) -> AgentSession:
        """A session as it is now, a chain of responses too. Raises NotFound."""
        return await self._load_any(principal.scope(), session_id)

    async def items(self, principal: Principal, session_id: str, page: PageRequest) -> Page[Item]:
        """One page of the history up to the head. Raises NotFound."""
        session = await self._load(principal.scope(), session_id)
        return await self._sessions.list_items(principal.scope(), session, _checked(page))

    async def start_turn(
        self,
        principal: Principal,
        session_id: str,
        turn_input: object,
        *,
        if_head: str | None = None,
        overrides: TurnOverrides = NO_OVERRIDES,
        tool_hints: ToolHints = NO_HINTS,
    ) -> RunningTurn:
        """Start a user's turn. Raises NotFound, Conflict, ValidationFailed, ContextLengthExceeded, LimitExceeded."""
        new_items = parse_input(turn_input)
        session = await self._load(principal.scope(), session_id)
        session.check_takes_turn(if_head)
        return await self.launch(principal, session, new_items, overrides.over(session.settings), tool_hints)

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
        return RunningTurn(principal.scope(), runner.turn, self._turns, self._reader, (runner, task))

    async def find_turn(self, principal: Principal, turn_id: TurnId) -> RunningTurn:
        """A turn that was started before, here or elsewhere. Raises NotFound."""
        turn = await self._turns.find_turn(principal.scope(), turn_id)
        if turn is None:
            raise NotFound("The turn does not exist.", code="turn_not_found")
        return RunningTurn(principal.scope(), turn, self._turns, self._reader)

    async def find_turn_of(self, principal: Principal, session_id: str, turn_id: str) -> RunningTurn:
        """A turn of a session that a client knows by its id. Raises NotFound."""
        session = await self._load(principal.scope(), session_id)
        turn = await self.find_turn(principal, TurnId(turn_id))
        if turn.session_id != session.session_id:
            raise NotFound("The session had no such turn.", code="turn_not_found")
        return turn

    async def tool_outputs(
        self, principal: Principal, session_id: str, outputs: Sequence[Mapping[str, Any]]
    ) -> ToolOutputsAnswer:
        """Store outputs `{call_id, output}`; the last missing one starts the next turn.

        When that turn fails the outputs stay, and sending any of them again starts another. If the start is refused
        (LimitExceeded, ContextLengthExceeded, CapacityAbsent) they stay as well. Raises NotFound, Conflict.
        """
        scope, given = principal.scope(), _tool_outputs(outputs)
        session = await self._load(scope, session_id)
        accepted = await self._sessions.accept_outputs(scope, session.session_id, given)
        if accepted.may_continue:
            try:
                turn = await self._continue(principal, accepted.session)
                return ToolOutputsAnswer(accepted.session, accepted.outputs, (), turn)
            except Conflict:
                # Another request with the same outputs was faster, or the session was rewound: look again.
                accepted = await self._sessions.accept_outputs(scope, session.session_id, given)
                if accepted.may_continue:
                    raise
        earlier = await self._earlier_turn(scope, accepted)
        if earlier is None and accepted.session.awaited_call_ids:
            named = {call.call_id: call.name for call in accepted.session.ledger}
            answered = [ToolWait(named[output.call_id]) for output in given if output.call_id in named]
            await self._launcher.kv.prefetch(await self._history(principal, accepted.session), answered)
        return ToolOutputsAnswer(accepted.session, accepted.outputs, accepted.session.awaited_call_ids, earlier)

    async def fork(
        self,
        principal: Principal,
        session_id: str,
        at: str | None = None,
        count: int = 1,
        kind: SessionKind = SessionKind.SESSION,
    ) -> list[AgentSession]:
        """New sessions that share the history up to `at` or the head, calls at its end awaited anew.

        Of a chain of responses only such a chain can be made. Raises NotFound, Conflict once closed, LimitExceeded.
        """
        if not 1 <= count <= MAX_FORKS:
            raise ValidationFailed(f"count must be from 1 to {MAX_FORKS}.", param="count")
        max_sessions = await self._max_sessions(principal, kind)
        load = self._load_any if kind is SessionKind.RESPONSES else self._load
        session = await load(principal.scope(), session_id)
        return await self._sessions.fork(
            principal.scope(), session.session_id, _checkpoint_argument(at), count, max_sessions, kind
        )

    async def rewind(self, principal: Principal, session_id: str, to: str) -> AgentSession:
        """Move the head to a checkpoint of the session's own; calls at its end are awaited anew.

        Raises NotFound, Conflict while a turn runs.
        """
        session = await self._load(principal.scope(), session_id)
        return await self._sessions.rewind(principal.scope(), session.session_id, _checkpoint_argument(to) or "")

    async def change(
        self,
        principal: Principal,
        session_id: str,
        *,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionChanged:
        """Pin another adapter version, or replace the metadata. Raises NotFound, Conflict while a turn runs."""
        scope = principal.scope()
        before = await self._load(scope, session_id)
        if metadata is not None:
            check_metadata(metadata)
        resolved = None if model is None else await self._registry.resolve(scope, model, self.base_name)
        session = await self._sessions.change(scope, before.session_id, SessionChange(resolved, metadata))
        head = await self._sessions.head(scope, session)
        if session.model.digest == before.model.digest or head is None:
            return SessionChanged(session, 0, 0)
        history = await self._history(principal, before)
        held = await self._launcher.kv.read(history)
        await self._launcher.kv.close(history)
        given_up = None if held is None else held.device_bytes + held.host_bytes + held.disk_bytes
        return SessionChanged(session, head.num_tokens, given_up)

    async def cancel(self, principal: Principal, session_id: str, turn_id: TurnId | None = None) -> AgentSession:
        """End the running turn, that one if it is named, as cancelled; nothing happens if it does not run.

        A turn of another process may still run when this returns: that process is told, and ends it shortly.
        """
        load = self._load if turn_id is None else self._load_any
        session = await load(principal.scope(), session_id)
        if not await self._launcher.cancel(session.session_id, turn_id):
            await self._sessions.request_cancel(principal.scope(), session.session_id, turn_id)
        return await load(principal.scope(), session_id)

    async def suspend(self, principal: Principal, session_id: str) -> AgentSession:
        """Put a session to sleep; its next turn or tool output wakes it. Raises Conflict while a turn runs."""
        session = await self._load(principal.scope(), session_id)
        suspended = await self._sessions.suspend(principal.scope(), session.session_id)
        await self._launcher.kv.suspend(await self._history(principal, suspended))
        return suspended

    async def prefetch(self, principal: Principal, session_id: str) -> Prefetched:
        """Bring a session's KV to the device, ahead of its next turn. Raises NotFound, Conflict once closed."""
        session = await self._load(principal.scope(), session_id)
        session.check_open()
        history = await self._history(principal, session)
        return Prefetched(session, len(history.token_ids), await self._launcher.kv.prefetch(history))

    async def read_cache(self, principal: Principal, session_id: str) -> tuple[AgentSession, SessionMemory | None]:
        """The session, and where its KV is; None where no engine answers. Raises NotFound."""
        session = await self._load(principal.scope(), session_id)
        return session, await self._launcher.kv.read(await self._history(principal, session))

    async def close_session(self, principal: Principal, session_id: str) -> AgentSession:
        """Cancel what runs, then make the session read-only. Raises Conflict if it runs in another process."""
        session = await self.cancel(principal, session_id)
        closed = await self._sessions.close(principal.scope(), session.session_id)
        await self._launcher.kv.close(await self._history(principal, closed))
        return closed

    async def hide(self, principal: Principal, session_id: str) -> None:
        """Cancel what runs, and keep the session only for the responses that stand on it, if any do."""
        session = await self.cancel(principal, session_id)
        await self._launcher.kv.close(await self._history(principal, session))
        await self._sessions.hide(principal.scope(), session.session_id)
        await self._sessions.remove_unused(principal.scope(), session.session_id)

    async def remove_unused(self, principal: Principal, session_id: SessionId) -> None:
        """Take away a chain of responses that nothing stands on any more, and those that it was forked from."""
        await self._sessions.remove_unused(principal.scope(), session_id)

    async def events(self, principal: Principal, session_id: str, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """The events behind number `after`; follows a running turn to its end. Raises NotFound before the first."""
        session = await self._load(principal.scope(), session_id)
        return self._reader.follow(principal.scope(), session.session_id, after)

    async def _history(self, principal: Principal, session: AgentSession) -> History:
        return History(principal, session, await self._turns.token_ids(principal.scope(), session))

    async def _load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """A session that a client knows by its id, as it is now."""
        session = await self._load_any(scope, session_id)
        if session.kind is SessionKind.RESPONSES:
            raise NotFound("The session does not exist.", code="session_not_found")
        return session

    async def _load_any(self, scope: TenantScope, session_id: str) -> AgentSession:
        """The session as it is now, a turn that nobody runs any more ended."""
        if not _may_be_id(session_id):
            raise NotFound("The session does not exist.", code="session_not_found")
        session = await self._sessions.load(scope, session_id)
        turn_id = session.running_turn_id
        has_expired = session.lease_expires_at is not None and session.lease_expires_at <= self._clock.now()
        if turn_id is None or not has_expired or turn_id in self._launcher.turn_ids:
            return session
        await self._turns.fail_interrupted(scope, session.session_id, turn_id)
        return await self._sessions.load(scope, session_id)

    async def _is_running(self, scope: TenantScope, session_id: SessionId) -> bool:
        return (await self._load_any(scope, session_id)).status is SessionStatus.RUNNING

    async def _max_sessions(self, principal: Principal, kind: SessionKind) -> int | None:
        """Only what a tenant knows as sessions is limited."""
        return await self._gate.max_sessions(principal) if kind is SessionKind.SESSION else None

    async def _continue(self, principal: Principal, session: AgentSession) -> RunningTurn:
        """Go on with the answers to all calls at the head, in the order of the calls."""
        answers = [function_call_output(call.call_id, call.output or "") for call in session.ledger]
        return await self.launch(principal, session, answers, NO_OVERRIDES.over(session.settings))

    async def _earlier_turn(self, scope: TenantScope, accepted: AcceptedOutputs) -> RunningTurn | None:
        """The turn that took these outputs when they were sent before."""
        turn = None if accepted.turn_id is None else await self._turns.find_turn(scope, accepted.turn_id)
        return None if turn is None else RunningTurn(scope, turn, self._turns, self._reader)


def _tool_outputs(outputs: Sequence[Mapping[str, Any]]) -> list[ToolOutput]:
    if not outputs:
        raise ValidationFailed("outputs must have at least one entry.", param="outputs")
    return [_tool_output(entry, f"outputs[{index}]") for index, entry in enumerate(outputs)]


def _tool_output(entry: Mapping[str, Any], param: str) -> ToolOutput:
    call_id = entry.get("call_id")
    if not isinstance(call_id, str):
        raise ValidationFailed(f"{param}.call_id must be a text.", param=f"{param}.call_id")
    if not _may_be_id(call_id):
        raise NotFound("The session made no such call.", param=f"{param}.call_id", code="call_not_found")
    if "output" not in entry:
        raise ValidationFailed(f"{param}.output is missing.", param=f"{param}.output")
    return ToolOutput(CallId(call_id), parse_output(entry["output"], f"{param}.output"))


def _checkpoint_argument(checkpoint_id: str | None) -> str | None:
    if checkpoint_id is not None and not _may_be_id(checkpoint_id):
        raise NotFound("The checkpoint does not exist in this session.", code="checkpoint_not_found")
    return checkpoint_id


def _checked(page: PageRequest) -> PageRequest:
    if page.after is not None and not _may_be_id(page.after):
        raise ValidationFailed("after must be the id of an entry of the list.", param="after")
    return page


def _may_be_id(text: str) -> bool:
    """PostgreSQL cannot even be asked about some characters, and no id has them."""
    return text.isascii() and text.isprintable()
