"""Refuses requests whose deadlines cannot be met in the gateway, by the forecasts that an engine sends with its load.

A refusal by the engine costs a round trip, in which the request waits for the engine's interpreter behind the steps of
others. Here it waits for nobody, and the engine does not see the request.

Owns the latest forecasts of one engine, and the number of requests that this gateway has sent since. It is for one event loop.
Invariant: it refuses only what is late by the engine's estimate of a moment ago, less the time that has passed, and more the
requests that were sent since. In doubt the engine decides: about lines that it has not forecast, old forecasts, and prompts
that are a large part of the deadline, because only the engine knows what of them is cached.
"""

import math
from collections import Counter, deque
from typing import NamedTuple

from graftwork.engine.core.deadlines import GATEWAY_AIM, UNSURE, FirstTokenForecast, line_of, unreachable
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.clock import Clock

_BELIEVED_S = 0.5
"""Forecasts are believed for so many seconds. While it works, an engine sends new ones several times as often."""
_ON_THE_WAY_S = 0.02
"""A request that is sent may be in no load that was made within so many seconds after it."""


class Sent(NamedTuple):
    """Requests that were sent to an engine."""

    requests: int = 0
    tokens: int = 0
    """Of their prompts."""


class SentRequests:
    """Counts the requests that were sent to an engine and that its latest load cannot know, by any key."""

    def __init__(self) -> None:
        self._each: deque[tuple[float, str, int]] = deque()
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def of(self, key: str) -> Sent:
        return Sent(self._requests[key], self._tokens[key])

    def add(self, at: float, key: str, tokens: int) -> None:
        """Adds a request with so many prompt tokens, which is sent at a time on the gateway's clock."""
        self._each.append((at, key, tokens))
        self._count(key, 1, tokens)

    def remove(self, key: str, tokens: int) -> None:
        """Takes back a request that the engine has refused. Does nothing if it is not counted any more."""
        for place, (_, other, size) in enumerate(self._each):
            if (other, size) == (key, tokens):
                del self._each[place]
                self._count(key, -1, -tokens)
                return

    def forget_before(self, made_at: float) -> None:
        """Forgets the requests that a load knows which was made at this time."""
        while self._each and self._each[0][0] < made_at - _ON_THE_WAY_S:
            _, key, tokens = self._each.popleft()
            self._count(key, -1, -tokens)

    def _count(self, key: str, requests: int, tokens: int) -> None:
        self._requests[key] += requests
        self._tokens[key] += tokens
        if not self._requests[key]:
            del self._requests[key], self._tokens[key]


class FirstTokenForecasts:
    """Decides about the requests that this gateway is about to send to one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_line: dict[str, FirstTokenForecast] = {}
        self._made_at = -math.inf
        self._sent = SentRequests()

    def note(self, load: EngineLoad) -> None:
        """Takes the forecasts of a load that has just come."""
        self._by_line = {}
        for line, wait_s, token_s, request_s, *_ in load.forecasts:  # a later version may say more
            self._by_line[line] = FirstTokenForecast(line, wait_s, token_s, request_s)
        self._made_at = self._clock.monotonic() - load.age_s
        self._sent.forget_before(self._made_at)

    def check(self, request: EngineRequest) -> None:
        """Raises CapacityContended, with the time to retry, if the request's first token would come after its deadline."""
        if request.deadline_s is not None and not request.emitted_token_ids:
            self.check_line(line_of(request), request.deadline_s, len(request.prompt_token_ids))

    def check_line(self, line: str, deadline_s: float, prompt_tokens: int = 0) -> None:
        """Raises CapacityContended if a request of this line would come too late, with a prompt of at least so many tokens."""
        age_s = self._clock.monotonic() - self._made_at
        forecast = self._by_line.get(line)
        if forecast is None or age_s > _BELIEVED_S:
            return
        own_s = forecast.token_s * prompt_tokens
        expected_s = forecast.wait_s + forecast.request_s * self._sent.of(line).requests + own_s - age_s
        if expected_s > GATEWAY_AIM * deadline_s and own_s <= UNSURE * deadline_s:
            raise unreachable(deadline_s, expected_s, aim=GATEWAY_AIM)

    def sent(self, request: EngineRequest) -> None:
        """Records that a request goes to the engine, which the latest forecasts cannot know."""
        self._sent.add(self._clock.monotonic(), line_of(request), 0)

    def refused(self, request: EngineRequest) -> None:
        """Records that the engine has refused a request that was sent."""
        self._sent.remove(line_of(request), 0)
