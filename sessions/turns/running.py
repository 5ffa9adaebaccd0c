"""Keeps the turns that run in this process.

Owns the tasks of turns, and ends them when the process shuts down. Never plans or stores a turn.
Invariant: a turn is listed before its row exists and until its outcome is stored, so recovery never ends it.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventFeed
from graftwork.sessions.generation.generator import Generation
from graftwork.sessions.turns.runner import TurnRunner

_log = logging.getLogger("graftwork.sessions")

TurnTask = tuple[TurnRunner, asyncio.Task[None]]
"""A turn, and the task that runs it."""


class RunningTurns:
    """Keeps the turns of this process until they end."""

    def __init__(self) -> None:
        self._runners: dict[SessionId, TurnRunner] = {}
        self._tasks: dict[TurnId, asyncio.Task[None]] = {}
        self._starting: set[TurnId] = set()
        self._launches: dict[asyncio.Task[TurnTask], SessionId] = {}
        self._is_closing = False

    @property
    def turn_ids(self) -> frozenset[TurnId]:
        """The turns that run here, or are about to."""
        return frozenset((*self._tasks, *self._starting))

    def feed_of(self, session_id: SessionId) -> EventFeed | None:
        """Returns the feed of the session's turn while it runs here."""
        runner = self._runners.get(session_id)
        return None if runner is None or runner.feed.is_closed else runner.feed

    async def launch(self, session_id: SessionId, launching: Coroutine[None, None, TurnTask]) -> TurnTask:
        """Runs a launch to its end, even if its caller is cancelled. Raises Unavailable after `close`."""
        if self._is_closing:
            launching.close()
            raise Unavailable("The server is shutting down: try again shortly.", retry_after_s=1.0)
        launch = asyncio.create_task(launching)
        self._launches[launch] = session_id
        launch.add_done_callback(self._forget_launch)
        return await asyncio.shield(launch)

    @contextmanager
    def starting(self, turn_id: TurnId) -> Iterator[None]:
        """Lists a turn while its row is made."""
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
        """Cancels the session's turn, or only the given turn, and waits for its end. Returns False if none runs here.

        First waits for launches of the session, because the row of their turn may already exist.
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
        """Fails the running turns and stores this outcome. No turn can be launched later."""
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
