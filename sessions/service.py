"""Serves sessions to the HTTP routes: one method for each action of a client.

Owns the order of checks and writes. Never uses HTTP types. AgentSession has the rules, TurnLauncher starts turns.
Invariant: if a method raises a `GraftworkError`, the session is unchanged, unless the method says otherwise.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from graftwork.adapters.format.specs import Caller, ResolvedModel
from graftwork.engine.core.session_commands import SessionMemory
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import InternalFailure, NotFound, ValidationFailed
from graftwork.platform.ids import TurnId
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.events import SessionEvent
from graftwork.sessions.core.items import Item, parse_input
from graftwork.sessions.core.session import (
    AgentSession,
    ModelResolver,
    SessionKind,
    SessionSettings,
    SessionStatus,
    Turn,
    new_session_id,
)
from graftwork.sessions.eraser import SessionEraser
from graftwork.sessions.store import session_limits
from graftwork.sessions.store.session_store import NewForks, SessionChange, SessionStore
from graftwork.sessions.store.turn_lists import TurnLists
from graftwork.sessions.sweeper import SessionSweeper
from graftwork.sessions.turns.launcher import ToolOutputs, TurnLauncher
from graftwork.sessions.turns.runner import NO_HINTS, ToolHints, TurnDependencies
from graftwork.sessions.turns.running import RunningTurns, SessionLoader, TurnHandle, TurnReader, may_be_id
from graftwork.sessions.turns.settings import (
    NO_OVERRIDES,
    TurnOverrides,
    check_metadata,
    checked_settings,
    with_defaults,
)

MAX_FORKS = 64
"""The most sessions that one fork request may create."""
RETENTION_S = 30 * 86_400.0
_POLL_S = 0.25
"""Seconds between two checks of a turn that runs in another process."""
_ABANDONED_AFTER_S = 3600.0
"""An age in seconds. An internal session of the Responses API to which no response refers is deleted at this age."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """A request for a new session. Its fields are not yet checked."""

    model: str
    settings: SessionSettings = field(default_factory=SessionSettings)
    metadata: Mapping[str, str] = field(default_factory=dict)
    retention_s: float | None = None
    kind: SessionKind = SessionKind.SESSION
    end_user: str | None = None
    """The user whose version of a canary the session gets; None gives the session a version of its own."""
    names_tools: bool = False
    """Whether the settings' tools are meant, also if there are none, instead of the adapter's own."""
    items: tuple[Item, ...] = ()
    """The history with which the session starts. Every tool call in it must have its output."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The result of a prefetch, which loads a session's KV to the device before its next turn."""

    session: AgentSession
    history_tokens: int
    memory: SessionMemory | None
    """How much of the KV is on each cache tier; None if the engine does not answer."""


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """The result of a PATCH request, which changes the model or the metadata of a session."""

    session: AgentSession
    given_up_tokens: int
    """The number of tokens of the history whose KV the new adapter version cannot use."""
    given_up_bytes: int | None
    """The size in bytes of the KV that the new adapter version cannot use; None if the engine does not answer."""


class SessionService:
    """Creates, reads, changes and deletes sessions and starts their turns, for all tenants, in one process. Call `recover`
    when the process starts, and `close` before it stops.
    """

    def __init__(
        self,
        database: Database,
        registry: ModelResolver,
        dependencies: TurnDependencies,
        retention_s: float = RETENTION_S,
    ) -> None:
        """Makes the service.

        `retention_s` is the time in seconds that a closed session stays readable if it has no time to live of its own.
        """
        clock, running = dependencies.clock, RunningTurns(dependencies.work)
        self._registry = registry
        self._limits_of = dependencies.accounting.limits_of
        self.counted = dependencies.accounting.counted
        self._clock: Clock = clock
        self._turns = dependencies.store
        self._kv = dependencies.kv
        self._running = running
        self._log = dependencies.log
        self.sweeper = SessionSweeper(database, clock, dependencies.kv, retention_s)
        self.store = SessionStore(database, clock, retention_s)
        self.eraser = SessionEraser(database, self.store, self.recover)
        self.loader = SessionLoader(self.store, dependencies.store, running)
        self.reader = TurnReader(dependencies.store, self.loader, running, _POLL_S)
        self.launcher = TurnLauncher(dependencies, running, self.reader)
        self.tool_outputs = ToolOutputs(self.loader, self.store, self.launcher, self.reader, dependencies.kv)
        self._turn_lists = TurnLists(database)
        self.base_name = dependencies.generator.description.model_name

    async def recover(self) -> int:
        """Marks turns as failed that a crashed process has left running. Returns their number. Call it at any time."""
        interrupted = await self._turns.find_interrupted(lambda: self._running.turn_ids)
        for scope, session_id, turn_id in interrupted:
            with suppress(InternalFailure):  # content that cannot be decrypted, which the log has
                await self._turns.fail_interrupted(scope, session_id, turn_id)
            await self.store.remove_unused(scope, session_id)
        return len(interrupted)

    async def sweep(self) -> int:
        """Deletes the sessions whose time to live has passed. Returns how many of them are completely deleted.

        Also marks interrupted turns as failed. Also deletes internal sessions of the Responses API to which no response
        refers any more.
        """
        await self.recover()
        for scope, session_id in await self.store.find_unused(self._clock.now() - _ABANDONED_AFTER_S):
            await self.store.remove_unused(scope, session_id)
        return await self.sweeper.sweep()

    async def close(self) -> None:
        """Ends the turns that run in this process as failed, and stores the last event of each turn.

        After this, no turn can start.
        """
        await self._running.close()
        await self._log.close()

    async def create(self, principal: Principal, new: NewSession) -> AgentSession:
        """Creates a session. Finds the adapter version for the model name of `new`, and the session keeps this version.

        Can raise ValidationFailed, InvalidRequest, NotFound or LimitExceeded.
        """
        check_metadata(new.metadata)
        principal = principal.for_user(new.end_user)
        session_id = new_session_id(new.kind)
        if new.kind is not SessionKind.CONVERSATION:  # a conversation has no model of its own
            principal.require_models([new.model])
        own = None if new.end_user else session_id
        caller = Caller.of(principal.key_id, user=new.end_user, session_id=own)
        model = await self._registry.resolve(principal.scope(), new.model, self.base_name, caller)
        now = self._clock.now()
        settings = checked_settings(with_defaults(new.settings, model.defaults, names_tools=new.names_tools))
        await self.launcher.plan_output(principal, settings)
        session = AgentSession(
            session_id=session_id,
            kind=new.kind,
            tenant_id=principal.tenant_id,
            status=SessionStatus.IDLE,
            model=model,
            settings=settings,
            metadata=new.metadata,
            created_at=now,
            updated_at=now,
            retention_s=new.retention_s,
            key_id=principal.limits_id,
            end_user_id=principal.end_user_id,
        )
        limits = await session_limits.of_new(self._limits_of, principal, new.kind)
        return await self.store.create(principal.scope(), session, limits, new.items)

    async def resolve(
        self, principal: Principal, model: str, caller: Caller, *, pinned: ResolvedModel | None = None
    ) -> ResolvedModel:
        """Finds the version to which `model` refers now. Raises NotFound, and NotPermitted if the key does not allow it."""
        principal.require_models([model])
        return await self._registry.resolve(principal.scope(), model, self.base_name, caller, pinned=pinned)

    async def list_sessions(self, principal: Principal, page: PageRequest) -> Page[AgentSession]:
        """Reads one page of a tenant's sessions, ordered by creation time."""
        return await self.store.list_sessions(principal.scope(), _checked(page))

    async def items(self, principal: Principal, session_id: str, page: PageRequest) -> Page[Item]:
        """Reads one page of the items of a session's history, up to the latest checkpoint.

        Raises NotFound if the session does not exist.
        """
        session = await self.loader.load(principal.scope(), session_id)
        return await self.store.list_items(principal.scope(), session, _checked(page))

    async def start_turn(
        self,
        principal: Principal,
        session_id: str,
        turn_input: object,
        *,
        if_head: str | None = None,
        overrides: TurnOverrides = NO_OVERRIDES,
        tool_hints: ToolHints = NO_HINTS,
    ) -> TurnHandle:
        """Starts a user's turn in a session, and returns access to the running turn.

        `if_head` is the id of the checkpoint that the client wants to continue. If this is not the session's latest
        checkpoint, raises Conflict. If `if_head` is None, continues the latest checkpoint.
        Can also raise NotFound, ValidationFailed, InvalidRequest, ContextLengthExceeded or LimitExceeded.
        """
        new_items = parse_input(turn_input)
        session = await self.loader.load(principal.scope(), session_id)
        session.check_takes_turn(if_head)
        return await self.launcher.launch(principal, session, new_items, overrides.over(session.settings), tool_hints)

    async def find_turn(self, principal: Principal, turn_id: TurnId) -> TurnHandle:
        """Returns access to a turn that was started earlier, in this process or another. The turn may have ended.

        Raises NotFound if the turn does not exist.
        """
        turn = await self.reader.find(principal.scope(), turn_id)
        if turn is None:
            raise NotFound("The turn does not exist.", code="turn_not_found")
        return turn

    async def find_turn_of(self, principal: Principal, session_id: str, turn_id: str) -> TurnHandle:
        """Returns access to a turn of the given session or conversation.

        Raises NotFound if the session does not exist, or if the turn is not one of its turns.
        """
        session = await self.loader.load(principal.scope(), session_id)
        turn = await self.find_turn(principal, TurnId(turn_id))
        if turn.session_id != session.session_id:
            raise NotFound("The session had no such turn.", code="turn_not_found")
        return turn

    async def list_turns(self, principal: Principal, session_id: str, page: PageRequest) -> Page[Turn]:
        """Reads one page of a session's own turns. Raises NotFound if the session does not exist."""
        session = await self.loader.load(principal.scope(), session_id)
        return await self._turn_lists.page(principal.scope(), session.session_id, _checked(page))

    async def fork(
        self,
        principal: Principal,
        session_id: str,
        at: str | None = None,
        count: int = 1,
        kind: SessionKind = SessionKind.SESSION,
    ) -> list[AgentSession]:
        """Creates `count` new sessions that share the history of a session up to one of its checkpoints.

        `at` is the id of this checkpoint; None means the latest one. If the shared history ends with tool calls, each
        new session awaits the outputs of these calls.
        Raises Conflict if the session is closed. Can also raise ValidationFailed, NotFound or LimitExceeded.
        """
        if not 1 <= count <= MAX_FORKS:
            raise ValidationFailed(f"count must be from 1 to {MAX_FORKS}.", param="count")
        load = self.loader.load_any if kind is SessionKind.RESPONSES else self.loader.load
        session = await load(principal.scope(), session_id)
        forks = NewForks(count, kind, principal.limits_id)
        by = replace(principal, end_user_id=session.end_user_id)
        limits = await session_limits.of_new(self._limits_of, by, kind)
        return await self.store.fork(principal.scope(), session.session_id, _checkpoint_argument(at), forks, limits)

    async def rewind(self, principal: Principal, session_id: str, to: str) -> AgentSession:
        """Moves a session back to one of its checkpoints. `to` is the id of this checkpoint.

        If the checkpoint ends with tool calls, the session awaits the outputs of these calls again.
        Raises Conflict while a turn runs. Can also raise NotFound.
        """
        session = await self.loader.load(principal.scope(), session_id)
        return await self.store.rewind(principal.scope(), session.session_id, _checkpoint_argument(to) or "")

    async def change(
        self,
        principal: Principal,
        session_id: str,
        *,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionChanged:
        """Changes the adapter version of a session, its metadata, or both. A value of None changes nothing.

        Raises Conflict if the session is closed, or if the model is to change while a turn runs, NotFound, ValidationFailed.
        """
        scope = principal.scope()
        before = await self.loader.load(scope, session_id)
        if metadata is not None:
            check_metadata(metadata)
        own = Caller.of(principal.key_id, session_id=before.session_id)
        resolved = None if model is None else await self.resolve(principal, model, own)
        session = await self.store.change(scope, before.session_id, SessionChange(resolved, metadata))
        head = await self.store.head(scope, session)
        if session.model.digest == before.model.digest or head is None:
            return SessionChanged(session, 0, 0)
        history = await self.loader.history(scope, before)
        held = await self._kv.read(history)
        kept = await self._kv.change_adapter(history)  # other sessions still use the rest
        given_up = None if held is None or kept is None else held.num_bytes - kept.num_bytes
        return SessionChanged(session, head.num_tokens, given_up)

    async def cancel(self, principal: Principal, session_id: str, turn_id: TurnId | None = None) -> AgentSession:
        """Cancels the running turn of a session, and waits for the end of the turn.

        If `turn_id` is given, cancels only that turn. Does nothing if no such turn runs. If another process runs the
        turn, that process notices the cancellation when it next stores events or renews its lease.
        """
        load = self.loader.load if turn_id is None else self.loader.load_any
        session = await load(principal.scope(), session_id)
        if not await self._running.cancel(session.session_id, turn_id):
            asked = await self.store.request_cancel(principal.scope(), session.session_id, turn_id)
            if asked.cancel_requested and asked.running_turn_id is not None:
                await (await self.find_turn(principal, asked.running_turn_id)).result()
        return await load(principal.scope(), session_id)

    async def suspend(self, principal: Principal, session_id: str) -> AgentSession:
        """Suspends a session: its KV leaves the device until the session's next turn or tool output.

        Raises Conflict while a turn runs. Can also raise NotFound.
        """
        session = await self.loader.load(principal.scope(), session_id)
        suspended = await self.store.suspend(principal.scope(), session.session_id)
        await self._kv.suspend(await self.loader.history(principal.scope(), suspended))
        return suspended

    async def prefetch(self, principal: Principal, session_id: str) -> Prefetched:
        """Loads a session's KV to the device before its next turn.

        Raises Conflict if the session is closed, and NotFound if it does not exist.
        """
        session = await self.loader.load(principal.scope(), session_id)
        session.check_open()
        history = await self.loader.history(principal.scope(), session)
        return Prefetched(session, len(history.token_ids), await self._kv.prefetch(history))

    async def read_cache(self, principal: Principal, session_id: str) -> tuple[AgentSession, SessionMemory | None]:
        """Returns a session, and the number of its tokens and bytes on each cache tier.

        The second value is None if the engine does not answer. Raises NotFound if the session does not exist.
        """
        session = await self.loader.load(principal.scope(), session_id)
        return session, await self._kv.read(await self.loader.history(principal.scope(), session))

    async def close_session(self, principal: Principal, session_id: str) -> AgentSession:
        """Cancels the running turn of a session, and makes the session read-only.

        Raises Conflict if another turn starts in the meantime. Can also raise NotFound.
        """
        session = await self.cancel(principal, session_id)
        closed = await self.store.close(principal.scope(), session.session_id)
        await self._kv.close(await self.loader.history(principal.scope(), closed))
        return closed

    async def hide(self, principal: Principal, session_id: str) -> None:
        """Cancels the running turn of a session, and deletes the session for its clients.

        If a response or a fork still uses the session, its rows stay in the database, but clients can no longer read
        it.
        """
        session = await self.cancel(principal, session_id)
        await self._kv.close(await self.loader.history(principal.scope(), session))
        await self.store.hide(principal.scope(), session.session_id)
        await self.store.remove_unused(principal.scope(), session.session_id)

    async def events(self, principal: Principal, session_id: str, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """Returns an iterator over the events of a session whose number is above `after`.

        The iterator ends when no turn runs. This method raises NotFound if the session does not exist, or if events after
        `after` are too old to be kept.
        """
        session = await self.loader.load(principal.scope(), session_id)
        await self.reader.check_kept(principal.scope(), session, after)
        return self.reader.follow(principal.scope(), session.session_id, after)


def _checkpoint_argument(checkpoint_id: str | None) -> str | None:
    if checkpoint_id is not None and not may_be_id(checkpoint_id):
        raise NotFound("The checkpoint does not exist in this session.", code="checkpoint_not_found")
    return checkpoint_id


def _checked(page: PageRequest) -> PageRequest:
    if page.after is not None and not may_be_id(page.after):
        raise ValidationFailed("after must be the id of an entry of the list.", param="after")
    return page
