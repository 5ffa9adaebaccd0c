"""Keeps the turns that run in this process, and reads sessions, turns and their events for clients.

Owns the asyncio tasks of turns, and ends these tasks at shutdown. Decides which sessions a client can see: internal
sessions of the Responses API, and sessions past their time to live, are hidden. Owns how events are read: first the
stored events, then the events that a running turn adds. Never plans or stores a turn. A turn continues to run if the
client that reads it disconnects.
Invariants: RunningTurns lists a turn before the row of the turn exists and until its outcome is stored, so this process
never mistakes its own turn for an interrupted one. If SessionLoader returns a session whose status is running, a
process still holds the lease of the session's turn.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager

from graftwork.platform.errors import NotFound, Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import RunningWork, TenantScope
from graftwork.sessions.core.events import EventFeed, SessionEvent
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionStatus, Turn
from graftwork.sessions.generation.generator import Generation
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.turns.kv import History
from graftwork.sessions.turns.runner import TurnRunner

_log = logging.getLogger("graftwork.sessions")


TurnTask = tuple[TurnRunner, asyncio.Task[None]]
"""A turn and the asyncio task that runs it."""


class RunningTurns:
    """The turns that run in this process, with their asyncio tasks."""

    def __init__(self, work: RunningWork) -> None:
        """`work` ends a turn when its tenant or key loses its access."""
        self._work = work
        self._runners: dict[SessionId, TurnRunner] = {}
        self._tasks: dict[TurnId, asyncio.Task[None]] = {}
        self._starting: set[TurnId] = set()
        self._launches: dict[asyncio.Task[TurnTask], SessionId] = {}
        self._is_closing = False

    @property
    def turn_ids(self) -> frozenset[TurnId]:
        """The ids of the turns that run in this process, and of the turns whose row is being stored."""
        return frozenset((*self._tasks, *self._starting))

    def feed_of(self, session_id: SessionId) -> EventFeed | None:
        """Returns the event feed of a session's running turn: the newest events, in memory.

        Returns None if no turn of the session runs in this process.
        """
        runner = self._runners.get(session_id)
        return None if runner is None or runner.feed.is_closed else runner.feed

    async def launch(self, session_id: SessionId, launching: Coroutine[None, None, TurnTask]) -> TurnTask:
        """Runs the coroutine `launching`, which plans and starts a turn of a session.

        Returns the started turn and its task. The coroutine runs to its end even if the caller is cancelled.
        Raises Unavailable after a call of `close`.
        """
        if self._is_closing:
            launching.close()
            raise Unavailable("The server is shutting down: try again shortly.", retry_after_s=1.0)
        launch = asyncio.create_task(launching)
        self._launches[launch] = session_id
        launch.add_done_callback(self._forget_launch)
        return await asyncio.shield(launch)

    @contextmanager
    def starting(self, turn_id: TurnId) -> Iterator[None]:
        """A context manager. While its block stores the row of a turn, the turn is in `turn_ids`."""
        self._starting.add(turn_id)
        try:
            yield
        finally:
            self._starting.discard(turn_id)

    def start(self, runner: TurnRunner, generation: Generation) -> TurnTask:
        """Starts a new asyncio task that runs a turn. Returns the turn and its task."""
        task = asyncio.create_task(runner.run(generation))
        turn_id, session_id = runner.turn.turn_id, runner.turn.session_id
        self._runners[session_id] = runner
        self._tasks[turn_id] = task
        forget_work = self._work.add(runner.plan.principal, lambda _: runner.cancel())

        def forget(task: asyncio.Task[None]) -> None:
            forget_work()
            del self._tasks[turn_id]
            if self._runners.get(session_id) is runner:
                del self._runners[session_id]
            if not task.cancelled() and task.exception() is not None:
                _log.error("the outcome of %s could not be stored", turn_id, exc_info=task.exception())

        task.add_done_callback(forget)
        return runner, task

    async def cancel(self, session_id: SessionId, turn_id: TurnId | None = None) -> bool:
        """Cancels the turn of a session that runs in this process, and waits until the turn has ended.

        If `turn_id` is given, cancels only that turn. Returns False if no such turn runs in this process.
        First waits until turns of the session that are just starting have started, because their rows may already
        exist.
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
        """Ends the turns of this process as failed, and waits until their outcomes are stored.

        After this, no turn can start.
        """
        self._is_closing = True
        if self._launches:
            await asyncio.wait(self._launches)
        for runner in self._runners.values():
            runner.shut_down()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _forget_launch(self, launch: asyncio.Task[TurnTask]) -> None:
        del self._launches[launch]
        if not launch.cancelled():
            launch.exception()  # marks the exception as seen, because the caller may be gone


class SessionLoader:
    """Reads sessions from the store for the requests of clients, and hides sessions that clients must not see.

    If a session has a turn whose process has stopped, first ends this turn.
    """

    def __init__(self, sessions: SessionStore, turns: TurnStore, running: RunningTurns) -> None:
        self._sessions = sessions
        self._turns = turns
        self._running = running

    async def load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Reads a session or a conversation from the store.

        Raises NotFound if the session does not exist or its time to live has passed. Also raises NotFound for internal
        sessions of the Responses API.
        """
        session = await self.load_any(scope, session_id)
        if session.kind is SessionKind.RESPONSES:
            raise _unknown_session()
        return session

    async def load_any(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Reads a session of any kind from the store, also an internal session of the Responses API.

        If the lease of the session's turn has expired, and this process does not run the turn, first ends the turn as
        failed.
        Raises NotFound if the session does not exist, or if its time to live has passed.
        """
        if not may_be_id(session_id):
            raise _unknown_session()
        session = await self._sessions.load(scope, session_id)
        turn_id = session.running_turn_id
        if turn_id is None or turn_id in self._running.turn_ids:
            return session
        if not await self._turns.has_expired(scope, session.session_id):
            return session
        await self._turns.fail_interrupted(scope, session.session_id, turn_id)
        return await self._sessions.load(scope, session_id)

    async def history(self, scope: TenantScope, session: AgentSession) -> History:
        """Reads the token ids of a session's history, up to the latest checkpoint."""
        return History(session, await self._turns.token_ids(scope, session))


def may_be_id(text: str) -> bool:
    """Returns whether `text` could be an id: all its characters are printable ASCII.

    PostgreSQL refuses some other characters, so such a text must not reach a query.
    """
    return text.isascii() and text.isprintable()


def _unknown_session() -> NotFound:
    return NotFound("The session does not exist.", code="session_not_found")


_PAGE_EVENTS = 256


class TurnReader:
    """Reads the turns and events of all sessions. Several requests may read the same session's events at once."""

    def __init__(self, store: TurnStore, loader: SessionLoader, running: RunningTurns, poll_s: float) -> None:
        """`poll_s` is the time in seconds between two checks of a turn that runs in another process."""
        self.store = store
        self._loader = loader
        self._running = running
        self._poll_s = poll_s

    async def find(self, scope: TenantScope, turn_id: TurnId) -> "TurnHandle | None":
        """Returns access to a turn that was started earlier, in this process or another. The turn may have ended.

        Returns None if the turn does not exist.
        """
        turn = await self.store.find_turn(scope, turn_id)
        return None if turn is None else TurnHandle(scope, turn, self)

    async def check_kept(self, scope: TenantScope, session: AgentSession, after: int) -> None:
        """Raises NotFound if an event of the session with a number just above `after` is deleted, because it is old.

        A reader that has seen no event, whose `after` is 0, gets all events that are left.
        """
        if not 0 < after < session.last_seq:
            return
        found = await self.store.list_events(scope, session.session_id, after, 1)
        first = found[0].seq if found else session.last_seq + 1
        if first > after + 1:
            raise NotFound(
                f"Events {after + 1} to {first - 1} of the session are not kept any more: read its items, and then its "
                f"events after {first - 1}.",
                param="after",
                code="events_not_kept",
            )

    async def follow(self, scope: TenantScope, session_id: SessionId, after: int) -> AsyncGenerator[SessionEvent]:
        """Yields the events of a session whose number is above `after`, and waits for new ones. Ends when no turn runs.

        Takes events from memory (the feed of a turn that runs in this process) if it has them, and otherwise from the
        store.
        """
        feed: EventFeed | None = None
        while True:
            if feed is None or (feed.is_closed and feed.last_seq <= after):
                feed = self._running.feed_of(session_id)
            # Get the change before reading the page, so that an event between the two steps is not missed.
            changed = None if feed is None else feed.next_change()
            page = None if feed is None else feed.after(after)
            if page is None:
                session = await self._loader.load_any(scope, session_id)
                page = await self.store.list_events(scope, session_id, after, _PAGE_EVENTS)
                if not page and session.status is not SessionStatus.RUNNING:
                    return
            for event in page:
                yield event
                after = event.seq
            if not page:
                await (asyncio.sleep(self._poll_s) if changed is None else changed.wait())


class TurnHandle:
    """Access to one turn: its events and its result, and a way to cancel it.

    The turn may run in this process or another, or it may have ended.
    """

    def __init__(self, scope: TenantScope, turn: Turn, reader: TurnReader, started: TurnTask | None = None) -> None:
        """`started` is the turn's task if this request has started the turn."""
        self._scope = scope
        self._turn = turn
        self._reader = reader
        self._started = started

    @property
    def turn_id(self) -> TurnId:
        return self._turn.turn_id

    @property
    def session_id(self) -> SessionId:
        return self._turn.session_id

    @property
    def rate_limit_headers(self) -> Mapping[str, str]:
        """The HTTP headers that show what is left of the tenant's quota after the reservation for this turn.

        They are empty if another request has started the turn.
        """
        return {} if self._started is None else self._started[0].account.reservation.rate_limit_headers()

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The paths of the schema keywords that the grammar of this turn ignores, because it cannot enforce them.

        There are none if another request has started the turn.
        """
        grammar = None if self._started is None else self._started[0].plan.request.grammar
        return () if grammar is None else grammar.unenforced

    @property
    def output_cap(self) -> int | None:
        """The operator's limit that has lowered the most tokens of the answer.

        It is None if there is no such limit, or if another request has started the turn.
        """
        return None if self._started is None else self._started[0].plan.request.output_cap

    @property
    def service_tier(self) -> str | None:
        """The service tier that serves the turn; None for turns that an older version of the server stored."""
        return self._turn.service_tier

    @property
    def num_dropped(self) -> int:
        """How many of the oldest items of the history the prompt leaves out.

        It is 0 if another request has started the turn.
        """
        return 0 if self._started is None else self._started[0].plan.num_dropped

    async def admitted(self) -> None:
        """Waits until the engine has admitted the prompt of the turn, or the turn has ended.

        Raises the engine's error if the engine refuses the prompt. Returns at once if another request has started the
        turn.
        """
        if self._started is not None:
            await self._started[0].admitted()

    def cancel(self) -> None:
        """Cancels the turn if this request has started it. Otherwise does nothing.

        Does not wait for the end of the turn.
        """
        if self._started is not None:
            self._started[0].cancel()

    async def stored(self) -> Turn:
        """Reads the turn from the store, as it is now. Raises NotFound if the turn was deleted."""
        turn = await self._reader.store.find_turn(self._scope, self.turn_id)
        if turn is None:
            raise NotFound("The turn does not exist any more.", code="turn_not_found")
        return turn

    async def events(self, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """Yields the events of this turn whose number is above `after`, up to the turn's last event.

        Waits for events that the turn has not made yet.
        """
        start = max(after, self._turn.first_seq - 1)
        async with aclosing(self._reader.follow(self._scope, self.session_id, start)) as events:
            async for event in events:
                if event.turn_id != self.turn_id:
                    return
                yield event
                if event.is_terminal:
                    return

    async def result(self) -> Turn:
        """Waits until the turn has ended, and reads the turn from the store.

        Raises Unavailable if the end of the turn could not be stored, or if the database does not answer. If this
        request has started the turn, it first tries for as long as the turn does. Raises NotFound if the turn was
        deleted.
        """
        if self._started is None:
            async with aclosing(self.events()) as events:
                async for _ in events:
                    pass
            return await self.stored()
        runner, running = self._started
        await asyncio.shield(running)
        return await runner.until_available(self.stored)
