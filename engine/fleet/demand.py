"""Lets requests wait for an engine while a fleet without engines starts one.

    request ──► no engine is ready ──► waits ──► an engine is ready ──► goes on
                      │                  └──► its time is over, or would be: 503 with the seconds that are left
                      └──► `on_demand`: whoever scales the fleet starts an engine

Owns the number of waiting requests, and how long a start takes. Never starts an engine.
"""

import asyncio
from collections.abc import Awaitable, Callable

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.fleet.members import no_engine
from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable

USUAL_START_S = 30.0
"""Seconds that the start of an engine is expected to take before one was seen."""
WAIT_AT_MOST_S = 120.0
"""Seconds that a request waits for an engine at most. Few clients wait longer for a first byte."""
_LEAST_LEFT_S = 1.0


class EngineDemand:
    """The requests that wait for the first engine of a fleet whose engines end when nothing needs them."""

    def __init__(self, clock: Clock, start_s: float = USUAL_START_S) -> None:
        self._clock = clock
        self._start_s = start_s
        self._num_waiting = 0
        self._num_refused = 0
        """Requests that did not wait, since the last call of `take`."""
        self._since: float | None = None
        """When the present start was asked for, on the monotonic clock; None if none was."""
        self.on_demand: Callable[[], None] = lambda: None
        """Is called when a request needs an engine and none is ready."""

    def note_start(self, seconds: float) -> None:
        """Records how long the start of an engine has taken."""
        self._start_s = seconds

    def take(self) -> int:
        """Returns how many requests wait, or were refused since the last call."""
        refused, self._num_refused = self._num_refused, 0
        return self._num_waiting + refused

    def note_ready(self) -> None:
        """Notes that an engine is ready. If one was asked for, its start took the time since then."""
        if self._since is not None:
            self._start_s = max(self._clock.monotonic() - self._since, _LEAST_LEFT_S)
            self._since = None

    @property
    def left_s(self) -> float:
        """The seconds until an engine is probably ready."""
        passed_s = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return max(self._start_s - passed_s, _LEAST_LEFT_S)

    def ask(self) -> Unavailable:
        """Asks for an engine without waiting for it. Returns the error for who asks."""
        self._num_refused += 1
        self._begin()
        return self._refusal()

    async def wait(self, request: EngineRequest, until_ready: Callable[[], Awaitable[None]]) -> None:
        """Waits with `until_ready` for an engine, for as long as the request may take.

        Raises Unavailable, with the seconds until an engine is probably ready: at once, if the request's time will be
        over before that, or when it is.
        """
        self._begin()
        given = [limit_s for limit_s in (request.deadline_s, request.timeout_s) if limit_s is not None]
        limit_s = min([WAIT_AT_MOST_S, *given])
        if self.left_s > limit_s:
            self._num_refused += 1
            raise self._refusal()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                await until_ready()
        except TimeoutError as error:
            raise self._refusal() from error
        finally:
            self._num_waiting -= 1
        self.note_ready()

    def _begin(self) -> None:
        if self._since is None:
            self._since = self._clock.monotonic()
        self.on_demand()

    def _refusal(self) -> Unavailable:
        return no_engine(
            f"It had no work and has no engine now; one starts, in about {self.left_s:.0f} s.", self.left_s
        )
