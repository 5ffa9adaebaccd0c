"""Asks a second engine for a first token that is late, and takes the answer of the one that is first.

    HedgeBudget       how many first tokens may be asked for twice
    FirstTokenTimes   how much later than estimated first tokens come
    race              the events of the first engine, or of the second one if it has a token before

Owns the times and the budget. Never chooses an engine.
Invariant: the caller of `race` gets the tokens of one engine only. The other request is cancelled, and is in no bill,
because bills count what a caller gets.
Source: hedged requests with a bound on their share (Dean and Barroso, The Tail at Scale, 2013).
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass

from graftwork.engine.core.events import EngineEvent, RequestFinished, TokensGenerated
from graftwork.engine.fleet.members import Member
from graftwork.engine.fleet.placer import Attempt
from graftwork.platform.errors import GraftworkError

HEDGED_SHARE = 0.05
"""The part of the requests of the priority tier whose first token a second engine may be asked for."""
_BURST = 4.0
"""The most hedges that are saved up."""
_LEAST_WAIT_S = 0.05
_SAMPLES = 256
_LEAST_SAMPLES = 32
"""First tokens that must have come before any counts as late."""
_LATE_QUANTILE = 0.95


class HedgeBudget:
    """Bounds the hedges: at most HEDGED_SHARE of the requests that begin, and a few more after a quiet time."""

    def __init__(self, share: float = HEDGED_SHARE, burst: float = _BURST) -> None:
        self._share = share
        self._burst = burst
        self._credit = burst

    def begin(self) -> None:
        """Notes that a request begins that may be hedged."""
        self._credit = min(self._credit + self._share, self._burst)

    def take(self) -> bool:
        """Takes one hedge from the budget. Returns False if there is none."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


class FirstTokenTimes:
    """Learns by which factor first tokens come later than placement has estimated."""

    def __init__(self) -> None:
        self._factors: deque[float] = deque(maxlen=_SAMPLES)

    def note(self, estimated_s: float, actual_s: float) -> None:
        """Records a first token. Times are seconds above 0."""
        self._factors.append(actual_s / max(estimated_s, 1e-6))

    def late_after_s(self, estimated_s: float) -> float | None:
        """Returns after how many seconds a first token is late: later than 95 % of the last ones were, by their own
        estimates. None while too few are known.
        """
        if len(self._factors) < _LEAST_SAMPLES:
            return None
        factor = sorted(self._factors)[int(_LATE_QUANTILE * len(self._factors))]
        return max(factor * estimated_s, _LEAST_WAIT_S)


@dataclass(eq=False, slots=True)
class Runner:
    """A request at one engine."""

    attempt: Attempt
    member: Member
    events: AsyncGenerator[EngineEvent, None]
    has_ended: bool = False

    async def close(self) -> None:
        """Ends the request, which cancels it at its engine if it still runs. A second call does nothing."""
        with suppress(GraftworkError):
            await self.events.aclose()
        if not self.has_ended:
            self.has_ended = True
            self.member.leave()


async def race(
    first: Runner,
    late_after_s: float,
    begin_second: Callable[[], Runner | None],
    on_failure: Callable[[Runner, GraftworkError], None],
    on_first_token: Callable[[Runner], None],
) -> AsyncGenerator[EngineEvent, None]:
    """Yields the events of `first`. If it has no token after `late_after_s` seconds, calls `begin_second`, and goes on
    with the engine that has a token first. `on_first_token` says which one that is.

    If one of two fails, goes on with the other and calls `on_failure`. Raises the error of the last that fails.
    """
    nexts: dict[asyncio.Task[EngineEvent], Runner] = {_next_of(first): first}
    runners = [first]
    timeout_s: float | None = late_after_s  # None once it has passed, also if there is no second engine
    try:
        winner: Runner | None = None
        while winner is None:
            done, _ = await asyncio.wait(nexts, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                timeout_s = None
                if (second := begin_second()) is not None:
                    runners.append(second)
                    nexts[_next_of(second)] = second
            for task in done:
                runner = nexts.pop(task)
                try:
                    event = task.result()
                except GraftworkError as error:
                    if not nexts:
                        raise
                    on_failure(runner, error)
                    continue
                if isinstance(event, TokensGenerated | RequestFinished):
                    winner = runner
                    on_first_token(winner)
                    await _cancel(nexts, [one for one in runners if one is not winner])
                    yield event
                    break
                nexts[_next_of(runner)] = runner
                yield event
        async for event in winner.events:
            yield event
    finally:
        await _cancel(nexts, runners)


def _next_of(runner: Runner) -> "asyncio.Task[EngineEvent]":
    async def get() -> EngineEvent:
        return await anext(runner.events)

    return asyncio.create_task(get(), name=f"first-token-{runner.member.replica_id}")


async def _cancel(nexts: "dict[asyncio.Task[EngineEvent], Runner]", runners: list[Runner]) -> None:
    """Ends the requests of runners, which cancels them at their engines."""
    for task in nexts:
        task.cancel()
    await asyncio.gather(*nexts, return_exceptions=True)
    nexts.clear()
    for runner in runners:
        await runner.close()
