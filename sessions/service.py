"""Sessions as the routes use them: one verb a route.

Owns the order of things: what is checked, stored and started, and when. The rules are AgentSession's, the rows the
stores', the running turns the launcher's.
Never knows HTTP. Every failure is a `GraftworkError`, and then nothing has changed unless the verb says so.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.session_commands import SessionMemory
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound, ValidationFailed
from graftwork.platform.ids import SessionId, TurnId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.sessions.core.events import SessionEvent
from graftwork.sessions.core.items import Item, parse_input
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionSettings, SessionStatus
from graftwork.sessions.store.session_store import SessionChange, SessionStore, new_session_id
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.sweeper import SessionSweeper
from graftwork.sessions.turns.access import SessionAccess, may_be_id
from graftwork.sessions.turns.event_reader import EventReader
from graftwork.sessions.turns.handle import RunningTurn
from graftwork.sessions.turns.launcher import LauncherResources, SessionTurns, TurnLauncher
from graftwork.sessions.turns.runner import NO_HINTS, ToolHints
from graftwork.sessions.turns.settings import NO_OVERRIDES, TurnOverrides, check_metadata, checked_settings
from graftwork.sessions.turns.tool_outputs import ToolAnswers, ToolOutputsAnswer

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
    items: tuple[Item, ...] = ()
    """What it begins with, made by nobody here. Every call among them is answered."""


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
    """Of the history whose KV the new adapter version cannot use."""
    given_up_bytes: int | None
    """None where no engine answers."""


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
        self._quota_of = resources.accounting.quota_of
        self._clock: Clock = resources.clock
        self._sessions = SessionStore(database, resources.clock, options.retention_s)
        self._turns = TurnStore(database, resources.clock, options.owner or new_id("gateway"), options.lease_s)
        self._launcher = TurnLauncher(resources, self._turns)
        self._sweeper = SessionSweeper(database, resources.clock, self._launcher.kv, options.retention_s)
        self._access = SessionAccess(self._sessions, self._turns, self._launcher, resources.clock)
        self._reader = EventReader(self._turns, self._launcher.feed_of, self._access.is_running, options.poll_s)
        self._running = SessionTurns(self._turns, self._launcher, self._reader)
        self._tools = ToolAnswers(self._access, self._sessions, self._running, self._launcher.kv)
        self.count_by_status = self._sessions.count_by_status
        """The sessions of all tenants by status, for metrics."""
        self.base_name = resources.generator.description.model_name

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
        max_sessions = await self._max_sessions(principal, new.kind)
        return await self._sessions.create(principal.scope(), session, max_sessions, new.items)

    async def resolve(self, principal: Principal, model: str) -> ResolvedModel:
        """The weights that `model` stands for now. Raises NotFound."""
        return await self._registry.resolve(principal.scope(), model, self.base_name)

    async def list_sessions(self, principal: Principal, page: PageRequest) -> Page[AgentSession]:
        """One page of the tenant's sessions, by the time they were made."""
        return await self._sessions.list_sessions(principal.scope(), _checked(page))

    async def get(self, principal: Principal, session_id: str) -> AgentSession:
        """A session as it is now. Raises NotFound."""
        return await self._access.load(principal.scope(), session_id)

    async def get_any(self, principal: Principal, session_id: SessionId) -> AgentSession:
        """A session as it is now, a chain of responses too. Raises NotFound."""
        return await self._access.load_any(principal.scope(), session_id)

    async def items(self, principal: Principal, session_id: str, page: PageRequest) -> Page[Item]:
        """One page of the history up to the head. Raises NotFound."""
        session = await self._access.load(principal.scope(), session_id)
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
        session = await self._access.load(principal.scope(), session_id)
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
        return await self._running.launch(principal, session, new_items, settings, tool_hints)

    async def find_turn(self, principal: Principal, turn_id: TurnId) -> RunningTurn:
        """A turn that was started before, here or elsewhere. Raises NotFound."""
        turn = await self._running.find(principal.scope(), turn_id)
        if turn is None:
            raise NotFound("The turn does not exist.", code="turn_not_found")
        return turn

    async def find_turn_of(self, principal: Principal, session_id: str, turn_id: str) -> RunningTurn:
        """A turn of a session that a client knows by its id. Raises NotFound."""
        session = await self._access.load(principal.scope(), session_id)
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
        return await self._tools.send(principal, session_id, outputs)

    async def read_tool_outputs(self, principal: Principal, session_id: str) -> ToolOutputsAnswer:
        """What is stored for the calls that the head ends in, and which are awaited. Raises NotFound."""
        return await self._tools.read(principal, session_id)

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
        load = self._access.load_any if kind is SessionKind.RESPONSES else self._access.load
        session = await load(principal.scope(), session_id)
        return await self._sessions.fork(
            principal.scope(), session.session_id, _checkpoint_argument(at), count, max_sessions, kind
        )

    async def rewind(self, principal: Principal, session_id: str, to: str) -> AgentSession:
        """Move the head to a checkpoint of the session's own; calls at its end are awaited anew.

        Raises NotFound, Conflict while a turn runs.
        """
        session = await self._access.load(principal.scope(), session_id)
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
        before = await self._access.load(scope, session_id)
        if metadata is not None:
            check_metadata(metadata)
        resolved = None if model is None else await self._registry.resolve(scope, model, self.base_name)
        session = await self._sessions.change(scope, before.session_id, SessionChange(resolved, metadata))
        head = await self._sessions.head(scope, session)
        if session.model.digest == before.model.digest or head is None:
            return SessionChanged(session, 0, 0)
        history = await self._access.history(principal, before)
        held = await self._launcher.kv.read(history)
        kept = await self._launcher.kv.close(history)  # what other sessions reach
        given_up = None if held is None or kept is None else held.num_bytes - kept.num_bytes
        return SessionChanged(session, head.num_tokens, given_up)

    async def cancel(self, principal: Principal, session_id: str, turn_id: TurnId | None = None) -> AgentSession:
        """End the running turn, that one if it is named, as cancelled; nothing happens if it does not run.

        Returns when it has ended. A turn of another process is told to: it hears of it with its next event or heartbeat.
        """
        load = self._access.load if turn_id is None else self._access.load_any
        session = await load(principal.scope(), session_id)
        if not await self._launcher.cancel(session.session_id, turn_id):
            asked = await self._sessions.request_cancel(principal.scope(), session.session_id, turn_id)
            if asked.cancel_requested and asked.running_turn_id is not None:
                await (await self.find_turn(principal, asked.running_turn_id)).result()
        return await load(principal.scope(), session_id)

    async def suspend(self, principal: Principal, session_id: str) -> AgentSession:
        """Put a session to sleep; its next turn or tool output wakes it. Raises Conflict while a turn runs."""
        session = await self._access.load(principal.scope(), session_id)
        suspended = await self._sessions.suspend(principal.scope(), session.session_id)
        await self._launcher.kv.suspend(await self._access.history(principal, suspended))
        return suspended

    async def prefetch(self, principal: Principal, session_id: str) -> Prefetched:
        """Bring a session's KV to the device, ahead of its next turn. Raises NotFound, Conflict once closed."""
        session = await self._access.load(principal.scope(), session_id)
        session.check_open()
        history = await self._access.history(principal, session)
        return Prefetched(session, len(history.token_ids), await self._launcher.kv.prefetch(history))

    async def read_cache(self, principal: Principal, session_id: str) -> tuple[AgentSession, SessionMemory | None]:
        """The session, and where its KV is; None where no engine answers. Raises NotFound."""
        session = await self._access.load(principal.scope(), session_id)
        return session, await self._launcher.kv.read(await self._access.history(principal, session))

    async def close_session(self, principal: Principal, session_id: str) -> AgentSession:
        """Cancel what runs, then make the session read-only. Raises Conflict if somebody starts a turn meanwhile."""
        session = await self.cancel(principal, session_id)
        closed = await self._sessions.close(principal.scope(), session.session_id)
        await self._launcher.kv.close(await self._access.history(principal, closed))
        return closed

    async def hide(self, principal: Principal, session_id: str) -> None:
        """Cancel what runs, and keep the session only for the responses that stand on it, if any do."""
        session = await self.cancel(principal, session_id)
        await self._launcher.kv.close(await self._access.history(principal, session))
        await self._sessions.hide(principal.scope(), session.session_id)
        await self._sessions.remove_unused(principal.scope(), session.session_id)

    async def remove_unused(self, scope: TenantScope, session_id: SessionId) -> None:
        """Take away a chain of responses that nothing stands on any more, and those that it was forked from."""
        await self._sessions.remove_unused(scope, session_id)

    async def events(self, principal: Principal, session_id: str, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """The events behind number `after`; follows a running turn to its end. Raises NotFound before the first."""
        session = await self._access.load(principal.scope(), session_id)
        return self._reader.follow(principal.scope(), session.session_id, after)

    async def _max_sessions(self, principal: Principal, kind: SessionKind) -> int | None:
        """Only what a tenant knows as sessions is limited."""
        return (await self._quota_of(principal.tenant_id)).max_sessions if kind is SessionKind.SESSION else None


def _checkpoint_argument(checkpoint_id: str | None) -> str | None:
    if checkpoint_id is not None and not may_be_id(checkpoint_id):
        raise NotFound("The checkpoint does not exist in this session.", code="checkpoint_not_found")
    return checkpoint_id


def _checked(page: PageRequest) -> PageRequest:
    if page.after is not None and not may_be_id(page.after):
        raise ValidationFailed("after must be the id of an entry of the list.", param="after")
    return page
