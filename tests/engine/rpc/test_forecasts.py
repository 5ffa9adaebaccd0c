"""Tests of refusals in the gateway, by the forecasts that an engine sends with its load."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from graftwork.engine.core.deadlines import FirstTokenForecast, Newcomer, line_of
from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.requests import AdapterUse, EngineRequest, ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.codec import load_from_json
from graftwork.engine.rpc.forecasts import FirstTokenForecasts
from graftwork.engine.rpc.server import EngineServer
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from tests.engine.conftest import RandomModels


def request(tokens: int = 10, deadline_s: float | None = 4.0) -> EngineRequest:
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompt = tuple(5 + number % 40 for number in range(tokens))
    request_id = RequestId(new_id("req"))
    return EngineRequest(request_id, prompt, sampling, IsolationDomain(b"tenant"), deadline_s=deadline_s)


def reported(*forecasts: FirstTokenForecast, age_s: float = 0.0) -> LoadReport:
    load = EngineLoad(forecasts=forecasts, age_s=age_s)
    return LoadReport(lambda: load)


def forecasts(clock: ManualClock, wait_s: float, token_s: float = 0.0, request_s: float = 0.0) -> FirstTokenForecasts:
    """Forecasts that have just come, of the line of `request`."""
    found = FirstTokenForecasts(clock)
    found.note(reported(FirstTokenForecast(line_of(request()), wait_s, token_s, request_s)))
    return found


def test_a_request_is_refused_that_would_come_too_late() -> None:
    """With 5 s until the first token, a deadline of 4 s is refused and one of 6 s is not. It would be let in after 1.4 s, when
    the first token is expected within 90 % of its deadline.
    """
    found = forecasts(ManualClock(), 5.0)

    found.check(request(deadline_s=6.0))
    with pytest.raises(CapacityContended) as refusal:
        found.check(request())

    assert (refusal.value.code, refusal.value.status) == ("deadline_unreachable", 429)
    assert refusal.value.retry_after_s == pytest.approx(5.0 - 0.9 * 4.0)


def test_a_line_is_refused_before_its_prompt_is_read() -> None:
    """What a request would wait for is enough to refuse it; the time that its prompt takes is unknown then, and not counted."""
    found = forecasts(ManualClock(), 3.5, token_s=0.1)

    with pytest.raises(CapacityContended) as refusal:
        found.check_line(line_of(request()), 3.0)
    found.check_line(line_of(request()), 4.0)
    found.check_line("another line", 3.0)

    assert refusal.value.retry_after_s == pytest.approx(3.5 - 0.9 * 3.0)


def test_what_has_passed_since_the_forecast_counts_for_the_request() -> None:
    """A forecast of 3.8 s refuses a deadline of 4 s for two tenths of a second. After half a second it refuses nothing. Its
    time begins when the engine made it, not when it came.
    """
    clock = ManualClock()
    found, late = forecasts(clock, 3.8), forecasts(clock, 60.0)
    came_late = FirstTokenForecasts(clock)
    came_late.note(reported(FirstTokenForecast(line_of(request()), 3.8, 0.0, 0.0), age_s=0.21))
    came_late.check(request())
    with pytest.raises(CapacityContended):
        found.check(request())

    clock.advance(0.21)
    found.check(request())
    with pytest.raises(CapacityContended):
        late.check(request())
    clock.advance(0.3)

    late.check(request())


def test_requests_that_were_sent_since_lengthen_the_wait_unless_the_engine_refuses_them() -> None:
    """A second request is refused behind a first, and is not after the engine has refused the first."""
    found, first = forecasts(ManualClock(), 3.3, request_s=0.5), request()
    found.check(first)
    found.sent(first)
    with pytest.raises(CapacityContended):
        found.check(request())

    found.refused(first, CapacityContended("The queue is full."))
    found.check(request())


def test_a_request_lengthens_the_wait_until_a_forecast_knows_it() -> None:
    """A request counts behind forecasts that were made before it was sent, and not behind one that was made afterwards."""
    clock = ManualClock()
    found, first = forecasts(clock, 3.3, request_s=0.5), request()
    found.sent(first)
    clock.advance(0.15)

    for age_s, knows_it in ((0.2, False), (0.1, True)):
        forecast = FirstTokenForecast(line_of(first), 3.5, 0.0, 0.5)
        found.note(reported(forecast, age_s=age_s))
        if knows_it:
            found.check(request())
        else:
            with pytest.raises(CapacityContended):
                found.check(request())


def test_the_engine_s_refusal_is_the_latest_forecast() -> None:
    """A refusal says when the first token would have come. Until the next load, a request like it is refused for as long as the
    error said, less the time since it was sent; one with a longer deadline, and one of another line, are not.
    """
    clock = ManualClock()
    found, late = forecasts(clock, 1.0, request_s=0.5), request()
    found.check(late)
    found.sent(late)
    clock.advance(0.02)
    found.refused(late, CapacityContended("Late.", code="deadline_unreachable", retry_after_s=0.3))
    clock.advance(0.1)

    with pytest.raises(CapacityContended) as refusal:
        found.check(request())
    found.check(request(deadline_s=5.0))
    found.check(replace(request(), domain=IsolationDomain(b"another")))
    assert refusal.value.retry_after_s == pytest.approx(0.3 + 0.95 * 4.0 - 0.12 - 0.9 * 4.0)

    found.note(reported(FirstTokenForecast(line_of(late), 1.0, 0.0, 0.5)))
    found.check(late)


def test_a_request_whose_prompt_is_being_read_is_waited_for() -> None:
    """A request that has passed before its prompt was read lengthens the wait for the next one of its line, until it comes, and
    for a tenth of a second at most.
    """
    clock = ManualClock()
    found, first = forecasts(clock, 3.3, request_s=0.5), request()
    found.check_line(line_of(first), 4.0)
    found.coming(line_of(first))
    with pytest.raises(CapacityContended):
        found.check_line(line_of(first), 4.0)

    found.come(first)
    found.check(first)
    found.coming(line_of(first))
    clock.advance(0.101)
    found.check(first)


def test_a_load_may_come_when_all_that_was_expected_is_too_old() -> None:
    """A request that was expected and never came is forgotten, by whoever asks first, and the next load is read."""
    clock = ManualClock()
    found, first = forecasts(clock, 3.3, request_s=0.5), request()
    found.check_line(line_of(first), 4.0)
    found.coming(line_of(first))
    clock.advance(0.2)
    found.check_line(line_of(first), 4.0)

    found.note(reported(FirstTokenForecast(line_of(first), 60.0, 0.0, 0.5)))

    with pytest.raises(CapacityContended):
        found.check_line(line_of(first), 4.0)


def test_lines_that_wait_no_longer_come_first() -> None:
    """Of two lines of a tier, what was sent of the one that waits less adds half a request's turn to the other, and the reverse
    adds nothing. Another tier's adds nothing.
    """
    clock, late = ManualClock(), request()
    soon, urgent = replace(late, domain=IsolationDomain(b"soon")), replace(late, tier=ServiceTier.PRIORITY)
    lines = [(late, 3.4), (soon, 3.39), (urgent, 0.1)]

    def refuses(sent: EngineRequest, asked: EngineRequest) -> bool:
        found = FirstTokenForecasts(clock)
        forecast = tuple(FirstTokenForecast(line_of(one), wait_s, 0.0, 0.5) for one, wait_s in lines)
        found.note(reported(*forecast))
        found.sent(sent)
        try:
            found.check(asked)
        except CapacityContended:
            return True
        return False

    assert [refuses(sent, late) for sent, _ in lines] == [True, True, False]
    assert [refuses(sent, soon) for sent, _ in lines] == [False, True, False]


def test_all_turns_of_sessions_are_in_one_line() -> None:
    """What is forecast for turns of sessions holds for every session of the tenant and its tier, and for nothing else."""
    found, turn = FirstTokenForecasts(ManualClock()), replace(request(), session=SessionUse(SessionKey("one")))
    found.note(reported(FirstTokenForecast(line_of(turn), 60.0, 0.0, 0.0)))

    found.check(request())
    for session in ("one", "two"):
        with pytest.raises(CapacityContended):
            found.check(replace(turn, session=SessionUse(SessionKey(session))))
    with pytest.raises(CapacityContended):
        found.check_line(Newcomer(turn.tier, turn.domain, in_session=True).line, 4.0)


@pytest.mark.parametrize(
    "other",
    [
        replace(request(), tier=ServiceTier.PRIORITY),
        replace(request(), domain=IsolationDomain(b"another")),
        replace(request(), adapters=(AdapterUse("sha256:wide"),)),
        replace(request(), session=SessionUse(SessionKey("one"))),
        replace(request(), emitted_token_ids=(7,)),
        request(deadline_s=None),
    ],
    ids=["tier", "domain", "adapter", "session", "moved", "no deadline"],
)
def test_other_requests_are_left_to_the_engine(other: EngineRequest) -> None:
    """A forecast says nothing about requests of other lines, that have moved from another engine, or without a deadline."""
    forecasts(ManualClock(), 60.0).check(other)


def test_a_prompt_that_may_be_cached_is_left_to_the_engine() -> None:
    """A prompt that alone may take more than a quarter of the deadline does not count, because it may be cached. What it would
    wait for counts all the same.
    """
    found, full = forecasts(ManualClock(), 3.0, token_s=0.002), forecasts(ManualClock(), 3.7, token_s=0.002)

    found.check(request(501))
    with pytest.raises(CapacityContended):
        found.check(request(499))
    with pytest.raises(CapacityContended):
        full.check(request(501))


def test_a_report_that_cannot_be_read_refuses_nothing() -> None:
    """Requests are left to an engine whose report is no load, or has forecasts of too few figures."""
    for text in ('{"forecasts": 3', '{"forecasts": [["a line"]]}'):
        found = forecasts(ManualClock(), 60.0)
        found.note(LoadReport(partial(load_from_json, text)))

        found.check(request())
        found.sent(request())


@pytest.mark.parametrize("listen", ["unix:{}/engine.sock", "127.0.0.1:0"], ids=["output socket", "grpc"])
async def test_a_gateway_refuses_without_a_round_trip_while_a_line_waits(
    models: RandomModels, tmp_path: Path, listen: str
) -> None:
    """While requests with deadlines wait, the engine's loads have their line. A request of it with a short deadline is then
    refused before the gateway waits for anything.
    """
    address = listen.format(tmp_path)
    server = EngineServer(models.engine(max_running=1, max_draft_tokens=0).engine, address)
    await server.start()
    client = GrpcEngineClient(address.replace(":0", f":{server.port}"))
    has_forecast = asyncio.Event()

    def note(report: LoadReport) -> None:
        if any(wait_s > 1 for _, wait_s, *_ in report.read().forecasts):
            has_forecast.set()

    client.follow_load(note)

    async def run() -> None:
        _ = [event async for event in client.generate(request(deadline_s=600.0))]

    waiting = [asyncio.create_task(run()) for _ in range(150)]
    async with asyncio.timeout(60):
        await has_forecast.wait()

    with pytest.raises(CapacityContended, match="Send the request again in"):
        anext(client.generate(request(1, deadline_s=0.2))).send(None)  # runs until it would wait

    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await client.close()
    await server.stop()
