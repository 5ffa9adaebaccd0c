"""Refuses requests whose deadlines cannot be met in the gateway, by the forecasts that an engine sends with its load.

A refusal by the engine costs a round trip, in which the request waits for the engine's interpreter behind the steps of
others. Here it waits for nobody, and the engine does not see the request.

Owns the latest forecasts of one engine, and what this gateway has sent since. It is for one event loop.
Invariant: it refuses only what is late by the engine's estimate of a moment ago, less the time that has passed, and more the
requests that were sent since. In doubt the engine decides: about lines that it has not forecast, by old forecasts, and what a
prompt adds that is a large part of the deadline, because only the engine knows what of it is cached.
"""

from collections.abc import Mapping

from graftwork.engine.core.deadlines import (
    AIM,
    DEADLINE_UNREACHABLE,
    GATEWAY_AIM,
    UNSURE,
    FirstTokenForecast,
    line_of,
    unreachable,
)
from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.rpc.latest_load import LatestWord
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended

_BELIEVED_S = 0.5
"""Forecasts are believed for so many seconds. While it works, an engine sends new ones several times as often."""


class FirstTokenForecasts:
    """Decides about the requests that this gateway is about to send to one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest = LatestWord(clock, _forecasts_of, _BELIEVED_S)

    def note(self, report: LoadReport) -> None:
        """Takes a report that has just come. Reads its forecasts when a request asks for them."""
        self._latest.note(report)

    def check(self, request: EngineRequest) -> None:
        """Raises CapacityContended, with the time to retry, if the request's first token would come after its deadline."""
        if request.deadline_s is not None and not request.emitted_token_ids:
            self.check_line(line_of(request), request.deadline_s, len(request.prompt_token_ids))

    def check_line(self, line: str, deadline_s: float, prompt_tokens: int = 0) -> None:
        """Raises CapacityContended if a request of this line would come too late, with a prompt of at least so many tokens."""
        now, by_line = self._clock.monotonic(), self._latest.by_key()
        forecast = by_line.get(line)
        if forecast is None:
            return
        own_s = forecast.token_s * prompt_tokens
        if own_s > UNSURE * deadline_s:
            own_s = 0.0  # it may be cached
        expected_s = forecast.wait_s + self._sent_since_s(by_line, forecast, now) + own_s - (now - self._latest.made_at)
        if expected_s > GATEWAY_AIM * deadline_s:
            raise unreachable(deadline_s, expected_s, aim=GATEWAY_AIM)

    def _sent_since_s(
        self, by_line: Mapping[str, FirstTokenForecast], forecast: FirstTokenForecast, now: float
    ) -> float:
        """Returns what the requests add to a line's wait that were sent since: those of the line itself, and those of lines of
        its tier that wait no longer. What one request of the line adds includes the turns of these lines, so one of theirs
        adds as much as that divided by their number.
        """
        tier = forecast.line.partition(" ")[0] + " "
        lines = [one for one in by_line.values() if one.line.startswith(tier)]
        before = [one.line for one in lines if one is not forecast and one.wait_s <= forecast.wait_s]
        others = sum(self._latest.sent.of(line, now).requests for line in before) / len(lines)
        return forecast.request_s * (self._latest.sent.of(forecast.line, now).requests + others)

    def coming(self, line: str) -> None:
        """Records that a request of this line will be sent, if all is well when its prompt is read."""
        if self._latest.by_key():
            self._latest.sent.expect(self._clock.monotonic(), line)

    def come(self, request: EngineRequest) -> None:
        """Records that a request that was coming is there."""
        self._latest.sent.come(line_of(request))

    def sent(self, request: EngineRequest) -> None:
        """Records that a request goes to the engine, which the latest forecasts cannot know."""
        self._latest.sent.add(self._clock.monotonic(), line_of(request), 0)

    def refused(self, request: EngineRequest, error: CapacityContended) -> None:
        """Records that the engine has refused a request that was sent. If it would have come too late, the error says when:
        until the next load, that is the latest forecast of its line.
        """
        line, now, by_line = line_of(request), self._clock.monotonic(), self._latest.by_key()
        forecast, sent_at = by_line.get(line), self._latest.sent.remove(line, 0)
        if error.code != DEADLINE_UNREACHABLE or sent_at is None or forecast is None or request.deadline_s is None:
            return
        own_s = forecast.token_s * len(request.prompt_token_ids)
        wait_s = (error.retry_after_s or 0.0) + AIM * request.deadline_s - own_s
        wait_s += sent_at - self._latest.made_at - self._sent_since_s(by_line, forecast, now)
        by_line[line] = forecast._replace(wait_s=max(wait_s, forecast.wait_s))


def _forecasts_of(load: EngineLoad) -> Mapping[str, FirstTokenForecast]:
    return {
        line: FirstTokenForecast(line, wait_s, token_s, request_s)
        for line, wait_s, token_s, request_s, *_ in load.forecasts  # a later version may say more
    }
