"""Runs the engine as a child process: starts it, waits until it answers, restarts it if it dies or freezes, and stops it.

Owns the child process. Never sends a request to the engine, except to ask whether it answers and advances.
Invariant: the child never runs longer than this process, and never after `EngineChild.stop` (see `engine_process`).
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from graftwork.api.server.engine_process import child_command, child_orders, read_report
from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.progress import FreezeLimits
from graftwork.platform.clock import Clock
from graftwork.platform.environment import child_environment
from graftwork.platform.errors import GraftworkError, Unavailable
from graftwork.platform.settings.settings import Settings

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LOOK_EVERY_S = 1.0
"""Seconds between two questions to the child whether it advances."""
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""A setting of the child's C library: use memory pages of 2 MiB, if the system allows that.

A forward pass is then about 5 % faster. See docs/operations.md.
"""
_STOP_WITHIN_S = 15.0
_SILENCES = 4.0
"""After how many times `engine_silence_s` a child that does not answer is killed. The gateway refuses requests much
earlier. A child that goes on in time keeps its memory, and a new one takes long to start.
"""
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0
_HEALTHY_AFTER_S = 30.0
"""A time in seconds. After a child that lived longer, the wait before the restart is the shortest one.

After a shorter life, the wait doubles each time.
"""


class EngineChild:
    """Starts the engine's process, restarts it when it dies, and stops it."""

    def __init__(
        self,
        settings: Settings,
        listen: str,
        clock: Clock,
        *,
        command: Sequence[str] | None = None,
        backoff_s: float = _FIRST_BACKOFF_S,
        look_every_s: float = _LOOK_EVERY_S,
        next_epoch: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`command` replaces the engine's command. `backoff_s` is the wait before the first restart, in seconds, and
        `look_every_s` the time between two questions to the child whether it advances. `next_epoch` is called before
        each start, and returns the epoch of the child; None gives it none.
        """
        self._settings, self._listen = settings, listen
        self._next_epoch = next_epoch
        self._must_restart = False
        self._limits = FreezeLimits(settings.engine_silence_s, settings.step_timeout_s)
        self._clock = clock
        self._command = command or child_command()
        self._first_backoff_s = backoff_s
        self._look_every_s = look_every_s
        self._process: asyncio.subprocess.Process | None = None
        self._report: int | None = None
        """A pipe. The child writes there the error that it ends with."""
        self._keeping: asyncio.Task[None] | None = None
        self.next_birth = asyncio.Event()
        """An event that is set when the next child process starts. A new event then replaces it."""

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, engine: EngineClient, report: Callable[[float], None]) -> None:
        """Starts the engine and waits until it answers.

        Calls `report` about once a second, with the seconds waited so far.
        If the child ends before it answers, raises the child's own error, or Unavailable if the child gave none.
        """
        await self._spawn()
        await self._wait_until_it_answers(engine, report)
        self._keeping = asyncio.create_task(self._keep_alive(engine), name="engine-keeper")

    async def stop(self) -> None:
        """Stops the child by SIGTERM, and by SIGKILL if the child takes too long. Returns when the child has ended."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            await self._end(self._process)
        await self._last_error()

    async def restart(self) -> None:
        """Ends the child in good order. It is then started again, as after each end."""
        if self._process is not None and self._process.returncode is None:
            self._must_restart = True
            await self._end(self._process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_WITHIN_S)
        except TimeoutError:
            logger.warning("engine did not stop in time; killing it")
            process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        # A process group of its own, so that Ctrl-C reaches only this process, which first lets running requests end.
        epoch = None if self._next_epoch is None else await self._next_epoch()
        report, childs_report = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(*self._command, str(childs_report)),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=[childs_report],
                env=child_environment({"GLIBC_TUNABLES": _HUGE_PAGES}),
            )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(childs_report)
        assert process.stdin is not None
        process.stdin.write(child_orders(self._settings, self._listen, epoch))
        with suppress(ConnectionError):  # it has died already; the code that waits for it notices
            await process.stdin.drain()
        self._process, self._report = process, report
        self.next_birth.set()
        self.next_birth = asyncio.Event()

    async def _wait_until_it_answers(self, engine: EngineClient, report: Callable[[float], None]) -> None:
        assert self._process is not None
        started_at = self._clock.monotonic()
        reported_s = 0
        while self._process.returncode is None:
            try:
                await engine.describe()
            except Unavailable:
                await asyncio.sleep(_POLL_S)
            else:
                return
            waited_s = self._clock.monotonic() - started_at
            if int(waited_s) > reported_s:
                reported_s = int(waited_s)
                report(waited_s)
        status = self._process.returncode
        raise await self._last_error() or Unavailable(f"The engine {_ending(status)} before it was ready.")

    async def _last_error(self) -> GraftworkError | None:
        """Returns the error that the ended child reported. The report can be read once."""
        if self._report is None:
            return None
        report, self._report = self._report, None
        return await asyncio.to_thread(read_report, report)

    async def _keep_alive(self, engine: EngineClient) -> None:
        backoff_s = self._first_backoff_s
        while True:
            assert self._process is not None
            born_at = self._clock.monotonic()
            ending = await self._ending(self._process, engine)
            lived_s = self._clock.monotonic() - born_at
            if lived_s > _HEALTHY_AFTER_S:
                backoff_s = self._first_backoff_s
            error = await self._last_error()
            logger.log(
                logging.INFO if self._must_restart else logging.ERROR,
                "engine %s; restarting it in %.1f s",
                ending if error is None else f"ended: {error.message}",
                backoff_s,
            )
            self._must_restart = False
            backoff_s = await self._respawn(backoff_s)

    async def _respawn(self, backoff_s: float) -> float:
        """Waits, and starts the child again, as often as it takes. Returns the wait before the next restart."""
        while True:
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
            try:
                await self._spawn()
            except OSError as error:  # such as no memory, no process or no descriptor that is free
                logger.error("the engine's process cannot be started (%s); trying again in %.1f s", error, backoff_s)
            else:
                return backoff_s

    async def _ending(self, process: asyncio.subprocess.Process, engine: EngineClient) -> str:
        """Waits until the child ends, and kills it if it freezes. Returns how it ended."""
        frozen = asyncio.create_task(self._frozen(engine))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((frozen, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return _ending(ended.result())
            process.kill()
            await ended
            return f"{frozen.result()} and was killed"
        finally:
            frozen.cancel()
            ended.cancel()

    async def _frozen(self, engine: EngineClient) -> str:
        """Waits until the child is frozen. Returns in which way. A child that has never answered still starts."""
        has_answered, silent_since = False, None
        while True:
            await asyncio.sleep(self._look_every_s)
            now = self._clock.monotonic()
            try:
                stalled_s = await engine.stalled_s()
            except Unavailable:
                silent_since = now if silent_since is None and has_answered else silent_since
                silent_s = 0.0 if silent_since is None else now - silent_since
                if silent_s > (_SILENCES - 1) * self._limits.silence_s:  # one silence passed before the first miss
                    return f"did not answer for {_SILENCES * self._limits.silence_s:g} s"
            else:
                has_answered, silent_since = True, None
                if stalled_s > self._limits.step_s:
                    return f"made no progress for {stalled_s:.0f} s"


def _ending(status: int | None) -> str:
    """Says how a child ended that reported no error, and what to do about it."""
    if status == -signal.SIGKILL:
        return "was killed by the system, which may have run out of memory: give smaller sizes,"
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}, for the reason above,"
