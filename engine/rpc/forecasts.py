"""Refuses requests whose deadlines cannot be met in the gateway, by the forecasts that an engine sends with its load.

A refusal by the engine costs a round trip, in which the request waits for the engine's interpreter behind the steps of
others. Here it waits for nobody, and the engine does not see the request.

Owns the latest forecasts of one engine, and the number of requests that this gateway has sent since. It is for one event loop.
Invariant: it refuses only what the engine would refuse by its estimate of a moment ago, less the time that has passed.
In doubt the engine decides: about lines that it has not forecast, old forecasts, and prompts that are a large part of the
deadline, because only the engine knows what of them is cached.
"""

import math
from collections import Counter
from contextlib import suppress

from graftwork.engine.core.deadlines import AIM, UNSURE, FirstTokenForecast, line_of, unreachable
from graftwork.engine.core.load import NO_LOAD, LoadReport
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable

_BELIEVED_S = 0.5
"""Forecasts are believed for so many seconds. While it works, an engine sends new ones several times as often."""
_UNSENT_S = 0.1
"""The usual age of forecasts when they come, at most: an engine makes and sends its load ten times a second."""


class FirstTokenForecasts:
    """Decides about the requests that this gateway is about to send to one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._report = LoadReport(lambda: NO_LOAD)
        self._by_line: dict[str, FirstTokenForecast] | None = {}
        """The forecasts of the latest report; None if they were not read yet."""
        self._noted_at = -math.inf
        self._sent: Counter[str] = Counter()
        """How many requests were sent since the latest forecasts, by line."""

    def note(self, report: LoadReport) -> None:
        """Takes a report that has just come. Reads its forecasts when a request asks for them."""
        self._report, self._by_line = report, None
        self._noted_at = self._clock.monotonic()
        self._sent.clear()

    def check(self, request: EngineRequest) -> None:
        """Raises CapacityContended, with the time to retry, if the request's first token would come after its deadline."""
        if request.deadline_s is not None and not request.emitted_token_ids:
            self.check_line(line_of(request), request.deadline_s, len(request.prompt_token_ids))

    def check_line(self, line: str, deadline_s: float, prompt_tokens: int = 0) -> None:
        """Raises CapacityContended if a request of this line would come too late, with a prompt of at least so many tokens."""
        age_s = self._clock.monotonic() - self._noted_at
        forecast = None if age_s > _BELIEVED_S else self._read().get(line)
        if forecast is None:
            return
        own_s = forecast.token_s * prompt_tokens
        expected_s = forecast.wait_s + forecast.request_s * self._sent[line] + own_s - age_s - _UNSENT_S
        if expected_s > AIM * deadline_s and own_s <= UNSURE * deadline_s:
            raise unreachable(deadline_s, expected_s)

    def sent(self, request: EngineRequest) -> None:
        """Records that a request goes to the engine, which the latest forecasts cannot know."""
        if self._read():
            self._sent[line_of(request)] += 1

    def refused(self, request: EngineRequest) -> None:
        """Records that the engine has refused a request that was sent."""
        line = line_of(request)
        if self._sent[line]:
            self._sent[line] -= 1

    def _read(self) -> dict[str, FirstTokenForecast]:
        """Returns the forecasts of the latest report by line, none if nobody can read it."""
        if self._by_line is None:
            self._by_line = {}
            with suppress(Unavailable, ValueError):
                for (
                    line,
                    wait_s,
                    token_s,
                    request_s,
                    *_,
                ) in self._report.read().forecasts:  # a later version may say more
                    self._by_line[line] = FirstTokenForecast(line, wait_s, token_s, request_s)
        return self._by_line
