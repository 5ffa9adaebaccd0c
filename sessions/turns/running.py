"""Keeps the turns that run in this process, and loads the session for an id that a client sent.

Owns the asyncio tasks of turns, and ends these tasks at shutdown. Also decides which sessions a client can see:
sessions that only hold responses, and sessions past their time to live, are hidden. Never plans or stores a turn.
Invariants: a turn is listed here before its row exists and until its outcome is stored, so this process never mistakes
it for an interrupted turn. A loaded session whose status is running has a process that runs its turn.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotFound, Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
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
    """The turns that run in this process."""

    def __init__(self) -> None:
        self._runners: dict[SessionId, TurnRunner] = {}
        self._tasks: dict[TurnId, asyncio.Task[None]] = {}
        self._starting: set[TurnId] = set()
        self._launches: dict[asyncio.Task[TurnTask], SessionId] = {}
        self._is_closing = False

    @property
    def turn_ids(self) -> frozenset[TurnId]:
        """The turns that run here or will start here."""
        return frozenset((*self._tasks, *self._starting))

    def feed_of(self, session_id: SessionId) -> EventFeed | None:
        """Returns the event feed of the session's running turn.

        Returns None if no turn of the session runs in this process.
        """
        runner = self._runners.get(session_id)
        return None if runner is None or runner.feed.is_closed else runner.feed

    async def launch(self, session_id: SessionId, launching: Coroutine[None, None, TurnTask]) -> TurnTask:
        """Runs `launching`, which starts a turn, to its end, even if the caller is cancelled.

        Raises Unavailable after `close`.
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
        """Adds a turn to `turn_ids` while its row is being stored."""
        self._starting.add(turn_id)
        try:
            yield
        finally:
            self._starting.discard(turn_id)

    def start(self, runner: TurnRunner, generation: Generation) -> TurnTask:
        """Runs a turn in its own task."""
        task = asyncio.create_task(runner.run(generation))
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
        return runner, task

    async def cancel(self, session_id: SessionId, turn_id: TurnId | None = None) -> bool:
        """Cancels the session's turn, or only the turn `turn_id`, and waits for its end.

        Returns False if no such turn runs here.
        First waits for turns of the session that are being started, because their rows may already exist.
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
        """Ends the running turns as failed, and waits until their outcomes are stored.

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
    """Loads the sessions of all tenants for ids that clients send."""

    def __init__(self, sessions: SessionStore, turns: TurnStore, running: RunningTurns, clock: Clock) -> None:
        self._sessions = sessions
        self._turns = turns
        self._running = running
        self._clock = clock

    async def load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Loads a session or a conversation. Raises NotFound, also for a session that only holds responses."""
        session = await self.load_any(scope, session_id)
        if session.kind is SessionKind.RESPONSES:
            raise _unknown_session()
        return session

    async def load_any(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Loads a session of any kind. Raises NotFound.

        If the lease of the session's turn has expired and this process does not run the turn, first ends the turn as
        failed.
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
        """Reads the token ids of the session's history, up to its latest checkpoint."""
        return History(session, await self._turns.token_ids(scope, session))


def may_be_id(text: str) -> bool:
    """Returns whether `text` could be an id. Other texts may contain characters that PostgreSQL refuses."""
    return text.isascii() and text.isprintable()


def _unknown_session() -> NotFound:
    return NotFound("The session does not exist.", code="session_not_found")
