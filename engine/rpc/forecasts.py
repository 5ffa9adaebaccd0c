"""Refuses requests whose deadlines cannot be met in the gateway, by the forecasts that an engine sends with its load.

A refusal by the engine costs a round trip, in which the request waits for the engine's interpreter behind the steps of
others. Here it waits for nobody, and the engine does not see the request.

Owns the latest forecasts of one engine, and what this gateway has sent since. It is for one event loop.
Invariant: it refuses only what is late by the engine's estimate of a moment ago, less the time that has passed, and more the
requests that were sent since. In doubt the engine decides: about lines that it has not forecast, by old forecasts, and what a
prompt adds that is a large part of the deadline, because only the engine knows what of it is cached.
"""

import math
from collections import Counter, deque
from contextlib import suppress
from typing import NamedTuple

from graftwork.engine.core.deadlines import (
    AIM,
    DEADLINE_UNREACHABLE,
    GATEWAY_AIM,
    UNSURE,
    FirstTokenForecast,
    line_of,
    unreachable,
)
from graftwork.engine.core.load import NO_LOAD, EngineLoad, LoadReport
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, Unavailable

_BELIEVED_S = 0.5
"""Forecasts are believed for so many seconds. While it works, an engine sends new ones several times as often."""
_ON_THE_WAY_S = 0.02
"""A request that is sent may be in no load that was made within so many seconds after it."""

_COMING_S = 0.1
"""A request that has passed before its prompt was read is expected for so many seconds."""


class Sent(NamedTuple):
    """Requests that were sent to an engine."""

    requests: int = 0
    tokens: int = 0
    """Of their prompts."""


class SentRequests:
    """Counts the requests that were sent to an engine and that its latest load cannot know, by any key, and those that will
    be sent when their prompts are read.
    """

    def __init__(self) -> None:
        self._each: deque[tuple[float, str, int]] = deque()
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._coming: dict[str, deque[float]] = {}
        """When each request was expected first that has not come, by key."""

    def of(self, key: str, now: float) -> Sent:
        """Returns the requests of a key, with those that are expected to come. Nothing is known of their prompts."""
        coming = self._coming.get(key)
        while coming and now - coming[0] > _COMING_S:
            coming.popleft()
        return Sent(self._requests[key] + len(coming or ()), self._tokens[key])

    def expect(self, at: float, key: str) -> None:
        """Expects a request that has passed at this time, on the gateway's clock. It is expected for a moment only."""
        self._coming.setdefault(key, deque()).append(at)

    def come(self, key: str) -> None:
        """Expects one request less, if any was expected: one has come, and is decided about or added."""
        coming = self._coming.get(key)
        if coming:
            coming.popleft()
        if not coming:
            self._coming.pop(key, None)

    def add(self, at: float, key: str, tokens: int) -> None:
        """Adds a request with so many prompt tokens, which is sent at a time on the gateway's clock."""
        self._each.append((at, key, tokens))
        self._count(key, 1, tokens)

    def remove(self, key: str, tokens: int) -> float | None:
        """Takes back a request that the engine has refused. Returns when it was sent; None if it is not counted any more."""
        for place, (at, other, size) in enumerate(self._each):
            if (other, size) == (key, tokens):
                del self._each[place]
                self._count(key, -1, -tokens)
                return at
        return None

    def forget_before(self, made_at: float) -> None:
        """Forgets the requests that a load knows which was made at this time."""
        while self._each and self._each[0][0] < made_at - _ON_THE_WAY_S:
            _, key, tokens = self._each.popleft()
            self._count(key, -1, -tokens)
        expected = self._coming.items()
        self._coming = {key: times for key, times in expected if times and made_at - times[-1] <= _COMING_S}

    def _count(self, key: str, requests: int, tokens: int) -> None:
        self._requests[key] += requests
        self._tokens[key] += tokens
        if not self._requests[key]:
            del self._requests[key], self._tokens[key]


class LatestLoad:
    """The latest load that an engine has sent, read when somebody asks for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._report = LoadReport(lambda: NO_LOAD)
        self._came_at = -math.inf

    def note(self, report: LoadReport) -> None:
        """Takes a report that has just come."""
        self._report, self._came_at = report, self._clock.monotonic()

    @property
    def came_at(self) -> float:
        """When the latest report came, in seconds of the clock; minus infinity before the first."""
        return self._came_at

    def read(self) -> tuple[EngineLoad, float]:
        """Returns the load, and when it was so in seconds of the clock; an empty load if nobody can read the report."""
        with suppress(Unavailable, ValueError):
            load = self._report.read()
            return load, self._came_at - load.age_s
        return NO_LOAD, self._came_at


class FirstTokenForecasts:
    """Decides about the requests that this gateway is about to send to one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest = LatestLoad(clock)
        self._is_read = True
        self._by_line: dict[str, FirstTokenForecast] = {}
        self._made_at = -math.inf
        self._sent = SentRequests()

    def note(self, report: LoadReport) -> None:
        """Takes a report that has just come. Reads its forecasts when a request asks for them."""
        self._latest.note(report)
        self._is_read = False
        self._sent.forget_before(self._latest.came_at - _BELIEVED_S)

    def _read(self) -> dict[str, FirstTokenForecast]:
        """Returns the forecasts of the latest report by line, none if nobody can read it."""
        if not self._is_read:
            self._is_read, self._by_line = True, {}
            load, self._made_at = self._latest.read()
            with suppress(ValueError):  # too few figures
                for line, wait_s, token_s, request_s, *_ in load.forecasts:  # a later version may say more
                    self._by_line[line] = FirstTokenForecast(line, wait_s, token_s, request_s)
            self._sent.forget_before(self._made_at)
        return self._by_line

    def check(self, request: EngineRequest) -> None:
        """Raises CapacityContended, with the time to retry, if the request's first token would come after its deadline."""
        if request.deadline_s is not None and not request.emitted_token_ids:
            self.check_line(line_of(request), request.deadline_s, len(request.prompt_token_ids))

    def check_line(self, line: str, deadline_s: float, prompt_tokens: int = 0) -> None:
        """Raises CapacityContended if a request of this line would come too late, with a prompt of at least so many tokens."""
        now, forecast = self._clock.monotonic(), self._read().get(line)
        age_s = now - self._made_at
        if forecast is None or age_s > _BELIEVED_S:
            return
        own_s = forecast.token_s * prompt_tokens
        if own_s > UNSURE * deadline_s:
            own_s = 0.0  # it may be cached
        expected_s = forecast.wait_s + self._sent_since_s(forecast, now) + own_s - age_s
        if expected_s > GATEWAY_AIM * deadline_s:
            raise unreachable(deadline_s, expected_s, aim=GATEWAY_AIM)

    def _sent_since_s(self, forecast: FirstTokenForecast, now: float) -> float:
        """Returns what the requests add to a line's wait that were sent since: those of the line itself, and those of lines of
        its tier that wait no longer. What one request of the line adds includes the turns of these lines, so one of theirs
        adds as much as that divided by their number.
        """
        tier = forecast.line.partition(" ")[0] + " "
        lines = [one for one in self._by_line.values() if one.line.startswith(tier)]
        before = [one.line for one in lines if one is not forecast and one.wait_s <= forecast.wait_s]
        others = sum(self._sent.of(line, now).requests for line in before) / len(lines)
        return forecast.request_s * (self._sent.of(forecast.line, now).requests + others)

    def coming(self, line: str) -> None:
        """Records that a request of this line will be sent, if all is well when its prompt is read."""
        now, by_line = self._clock.monotonic(), self._read()
        if now - self._made_at <= _BELIEVED_S and by_line:
            self._sent.expect(now, line)

    def come(self, request: EngineRequest) -> None:
        """Records that a request that was coming is there."""
        self._sent.come(line_of(request))

    def sent(self, request: EngineRequest) -> None:
        """Records that a request goes to the engine, which the latest forecasts cannot know."""
        self._sent.add(self._clock.monotonic(), line_of(request), 0)

    def refused(self, request: EngineRequest, error: CapacityContended) -> None:
        """Records that the engine has refused a request that was sent. If it would have come too late, the error says when:
        until the next load, that is the latest forecast of its line.
        """
        line, now = line_of(request), self._clock.monotonic()
        forecast, sent_at = self._read().get(line), self._sent.remove(line, 0)
        if error.code != DEADLINE_UNREACHABLE or sent_at is None or forecast is None or request.deadline_s is None:
            return
        own_s = forecast.token_s * len(request.prompt_token_ids)
        wait_s = (error.retry_after_s or 0.0) + AIM * request.deadline_s - own_s
        wait_s += sent_at - self._made_at - self._sent_since_s(forecast, now)
        self._by_line[line] = forecast._replace(wait_s=max(wait_s, forecast.wait_s))
