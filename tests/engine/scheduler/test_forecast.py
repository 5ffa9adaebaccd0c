"""Tests of the forecasts of first tokens: against the scheduler's own decisions, and in a gateway that refuses by them."""

from random import Random

import pytest

from graftwork.engine.core.deadlines import AIM, Newcomer, line_of
from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.requests import EngineRequest, ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.rpc.codec import load_from_json, to_json
from graftwork.engine.rpc.forecasts import FirstTokenForecasts
from graftwork.engine.scheduler.forecast import MAX_LINES, forecast_first_tokens
from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.test_first_token import TimedDriver, run, trace


class ForecastingGateway:
    """A gateway that gets an engine's forecasts again after every tenth of a simulated second, as it does over gRPC."""

    def __init__(self, driver: TimedDriver) -> None:
        self._driver = driver
        self._forecasts = FirstTokenForecasts(driver.clock)
        self._noted_at = driver.clock.monotonic()
        self._latest: EngineRequest | None = None

    def follow(self) -> None:
        """Notes the forecasts of this moment, if it is time."""
        if self._driver.clock.monotonic() - self._noted_at >= 0.1:
            self._noted_at, scheduler = self._driver.clock.monotonic(), self._driver.scheduler
            forecasts = forecast_first_tokens(scheduler.deadlines.snapshot(), scheduler.requests.waiting)
            text = to_json(EngineLoad(forecasts=forecasts))
            self._forecasts.note(LoadReport(lambda: load_from_json(text)))

    def check(self, name: str, prompt: list[int], domain: IsolationDomain, deadline_s: float | None) -> None:
        """Decides about a request before the engine sees it. Raises CapacityContended."""
        sampling = SamplingParams(max_tokens=9)
        request = EngineRequest(RequestId(name), tuple(prompt), sampling, domain, deadline_s=deadline_s)
        self._forecasts.check(request)
        self._forecasts.sent(request)
        self._latest = request

    def refused(self, error: CapacityContended) -> None:
        """Notes that the engine has refused the request that was checked last."""
        assert self._latest is not None
        self._forecasts.refused(self._latest, error)


def test_refusals_by_forecasts_are_as_honest_and_spare_the_engine_most_of_them() -> None:
    """With a gateway that knows forecasts up to 0.1 s old, 9 of 10 refused requests would have been late, 99 of 100 admitted
    ones are in time, as many are in time as without it, and the scheduler sees at most 7 of 100 refused ones.
    """
    arrivals = trace(1, load=5.0, seconds=12.0)
    deadlines = {one.name: one.deadline_s for one in arrivals}

    by_both, by_engine = run(arrivals, refuses=True, make_gateway=ForecastingGateway), run(arrivals, refuses=True)
    all_wait = run(arrivals, refuses=False)

    in_time, before = (
        [name for name, ttft_s in one.ttft_s.items() if ttft_s <= deadlines[name]] for one in (by_both, by_engine)
    )
    would_be_late = [name for name in by_both.refused if all_wait.ttft_s[name] > deadlines[name]]
    assert len(would_be_late) >= 0.9 * len(by_both.refused)
    assert len(in_time) >= 0.99 * (len(arrivals) - len(by_both.refused))
    assert len(in_time) >= 0.97 * len(before)
    assert len(by_both.by_gateway) >= 0.93 * len(by_both.refused)


@pytest.mark.parametrize("domain", [b"a", b"b"])
def test_a_forecast_is_the_shortest_deadline_that_the_scheduler_accepts(domain: bytes) -> None:
    """For a prompt of the mean length of its line, the forecast is the part `AIM` of the shortest deadline that is accepted,
    found by halving, to a millisecond.
    """
    random, driver = Random(5), TimedDriver(max_waiting=1000)
    for number in range(80):
        prompt = [random.randrange(10, 90) for _ in range(12 if number % 2 else 20)]
        driver.submit(f"r{number}", prompt, domain=IsolationDomain(b"a" if number % 3 else b"b"))
    for _ in range(20):
        driver.timed_step()
    waiting = [state for state in driver.scheduler.requests.waiting if state.domain == domain]
    tokens = sum(state.num_prompt for state in waiting) // len(waiting)

    found = forecast_first_tokens(driver.scheduler.deadlines.snapshot(), driver.scheduler.requests.waiting)

    (forecast,) = [one for one in found if one.line == line_of(waiting[0].request)]
    prompt = [random.randrange(10, 90) for _ in range(tokens)]
    low, high = 0.0, 60.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        try:
            driver.submit("new", prompt, domain=IsolationDomain(domain), deadline_s=middle)
        except (CapacityContended, Unavailable):
            low = middle
        else:
            high = middle
            driver.scheduler.cancel(RequestId("new"))
    assert forecast.wait_s + forecast.token_s * (tokens - 1) == pytest.approx(AIM * high, abs=1e-3)


def turn_of(session: str) -> SessionUse:
    return SessionUse(SessionKey(session))


def test_turns_of_sessions_are_forecast_for_a_session_that_has_nothing_here() -> None:
    """For turns of sessions there is one forecast of their tenant: the part `AIM` of the shortest deadline that the scheduler
    accepts of a session that is new, and no more than that of one which has a turn waiting.
    """
    random, driver = Random(5), TimedDriver(max_waiting=1000)
    prompts = [[random.randrange(10, 90) for _ in range(16)] for _ in range(61)]
    for number, prompt in enumerate(prompts[:60]):
        driver.submit(f"r{number}", prompt, domain=IsolationDomain(b"a"), session=turn_of(f"session {number % 20}"))
    for _ in range(20):
        driver.timed_step()

    found = forecast_first_tokens(driver.scheduler.deadlines.snapshot(), driver.scheduler.requests.waiting)

    (forecast,) = found
    assert forecast.line == Newcomer(ServiceTier.DEFAULT, IsolationDomain(b"a"), in_session=True).line

    def accepted_s(session: str) -> float:
        low, high = 0.0, 60.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            try:
                driver.submit(
                    "new", prompts[60], domain=IsolationDomain(b"a"), session=turn_of(session), deadline_s=middle
                )
            except (CapacityContended, Unavailable):
                low = middle
            else:
                high = middle
                driver.scheduler.cancel(RequestId("new"))
        return AIM * high

    expected_s = forecast.wait_s + forecast.token_s * 15
    assert expected_s == pytest.approx(accepted_s("new"), abs=1e-3)
    assert expected_s <= accepted_s("session 19") + 1e-3


def test_only_the_longest_lines_are_forecast() -> None:
    """Of twenty tenants of which the last ones have two requests waiting, `MAX_LINES` are forecast, and these among them."""
    random, driver = Random(5), TimedDriver(max_running=1, max_waiting=1000)
    for number in range(40):
        domain = IsolationDomain(f"tenant {number % 20 if number < 20 else 10 + number % 10}".encode())
        driver.submit(f"r{number}", [random.randrange(10, 90) for _ in range(9)], domain=domain)
    driver.timed_step()

    found = forecast_first_tokens(driver.scheduler.deadlines.snapshot(), driver.scheduler.requests.waiting)

    lines = {one.line for one in found}
    assert len(found) == len(lines) == MAX_LINES
    assert all(f"default {f'tenant {number}'.encode().hex()}  " in lines for number in range(10, 20))
