"""Keeps the turns that run in this process, and reads the sessions that clients ask for.

Owns the asyncio tasks of turns, and ends these tasks at shutdown. Also decides which sessions a client can see:
internal sessions of the Responses API, and sessions past their time to live, are hidden. Never plans or stores a turn.
Invariants: RunningTurns lists a turn before the row of the turn exists and until its outcome is stored, so this process
never mistakes its own turn for an interrupted one. If SessionLoader returns a session whose status is running, a
process still holds the lease of the session's turn.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotFound, Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.running_work import RunningWork
from graftwork.sessions.core.events import EventFeed
from graftwork.sessions.core.session import AgentSession, SessionKind
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

    def __init__(self, sessions: SessionStore, turns: TurnStore, running: RunningTurns, clock: Clock) -> None:
        self._sessions = sessions
        self._turns = turns
        self._running = running
        self._clock = clock

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
        has_expired = session.lease_expires_at is not None and session.lease_expires_at <= self._clock.now()
        if turn_id is None or not has_expired or turn_id in self._running.turn_ids:
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
