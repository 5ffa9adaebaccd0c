"""Tests of how a gateway notices silent engines: soon, and without false alarms on a busy machine."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.fleet.silence import LEAST_LIMIT_S, TICK_S, SilenceMonitor

MOST_S = 5.0


def ticks(monitor: SilenceMonitor, start: float, seconds: float) -> float:
    """Lets `seconds` pass in ticks. Returns the time at the end."""
    for _ in range(round(seconds / TICK_S)):
        start += TICK_S
        monitor.tick(start)
    return start


def answered(monitor: SilenceMonitor, start: float, waits: list[float]) -> float:
    """Lets an engine answer questions after these waits. Returns the time at the end."""
    monitor.tick(start)
    for wait in waits:
        monitor.ask("a")
        start = ticks(monitor, start, wait)
        monitor.note_answer("a")
    return start


def test_a_stopped_engine_is_noticed_within_a_second() -> None:
    """An engine that has answered at once is silent after 0.9 s without an answer, and not after 0.7 s."""
    monitor = SilenceMonitor(MOST_S)
    now = answered(monitor, 0.0, [0.0] * 20)

    monitor.ask("a")
    now = ticks(monitor, now, 0.7)
    assert monitor.silent_s("a") == 0.0
    ticks(monitor, now, 0.2)

    assert monitor.silent_s("a") > LEAST_LIMIT_S


@given(st.lists(st.integers(1, 16).map(lambda number: number * TICK_S), min_size=1, max_size=60))
def test_an_engine_is_never_silent_within_three_times_its_usual_wait(waits: list[float]) -> None:
    """However late an engine answers usually, it has three times its longest wait, and never more than the limit."""
    monitor = SilenceMonitor(MOST_S)
    now = answered(monitor, 0.0, waits)
    patience = min(max(3 * max(waits), LEAST_LIMIT_S), MOST_S)

    monitor.ask("a")
    now = ticks(monitor, now, patience - 2 * TICK_S)
    early = monitor.silent_s("a")
    ticks(monitor, now, 4 * TICK_S)

    assert early == 0.0
    assert monitor.silent_s("a") > 0.0


def test_a_gateway_that_was_stopped_itself_suspects_nobody() -> None:
    """After 20 s in which this process did not run, a question that was open has waited two ticks, not 20 s."""
    monitor = SilenceMonitor(MOST_S)
    now = answered(monitor, 0.0, [0.0])
    monitor.ask("a")

    monitor.tick(now + 20.0)

    assert monitor.silent_s("a") == 0.0


def test_time_without_ticks_is_no_silence() -> None:
    """Ticks pause while no question is open: the time before they begin again counts in no wait."""
    monitor = SilenceMonitor(MOST_S)
    now = answered(monitor, 0.0, [0.0] * 20)
    assert not monitor.has_questions

    now += 3600.0
    monitor.ask("a")
    monitor.start(now)
    assert monitor.has_questions
    now = ticks(monitor, now, LEAST_LIMIT_S)
    assert monitor.silent_s("a") == 0.0
    ticks(monitor, now, TICK_S)

    assert monitor.silent_s("a") > LEAST_LIMIT_S


def test_tokens_are_signs_of_life() -> None:
    """An engine whose tokens come is not silent, though it answers no question for a long time."""
    monitor = SilenceMonitor(MOST_S)
    now = 0.0
    monitor.ask("a")

    for _ in range(40):
        now = ticks(monitor, now, 0.5)
        monitor.note_sign("a")
        assert monitor.silent_s("a") == 0.0


def test_an_engine_that_never_answered_shows_nothing() -> None:
    """Only an engine with an answer to its name answers; one that waits for long does not, until its next answer."""
    monitor = SilenceMonitor(MOST_S)
    assert not monitor.answers("a")
    now = answered(monitor, 0.0, [0.0])
    assert monitor.answers("a")

    monitor.ask("a")
    now = ticks(monitor, now, 0.5)
    assert not monitor.answers("a")
    monitor.note_answer("a")

    assert monitor.answers("a")
