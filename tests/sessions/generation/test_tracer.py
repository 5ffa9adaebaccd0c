"""Tests of what the trace of a generation estimates from the tokens that it measures."""

from collections.abc import Sequence

import pytest

from graftwork.engine.core.events import CacheReport, DraftReport, TokenLogprobs
from graftwork.platform.clock import ManualClock
from graftwork.platform.tracing.request_trace import RequestTrace
from graftwork.platform.tracing.trace_ids import TraceIds
from graftwork.sessions.generation.events import OutputEvent, TextDelta
from graftwork.sessions.generation.tracer import GenerationTracer
from graftwork.sessions.generation.usage import Usage

PUSH_S, WRITE_S, EVENTS, TOKENS, ACCEPTED = 2.0, 5.0, 3, 10, 4


@pytest.mark.parametrize("as_generated", [True, False])
def test_times_are_those_of_the_measured_tokens_for_all_steps(as_generated: bool) -> None:
    """The parser's time is that of the measured step for each step, which has one token beside its accepted drafts; the
    writes' time is what the reader took for each event, if it writes them itself.
    """
    clock = ManualClock()
    trace = RequestTrace(TraceIds("req_1", "0" * 32), "POST", "/v1/chat/completions", clock)
    trace.is_traced, trace.is_written_as_generated = True, as_generated
    tracer = GenerationTracer(trace, "req_1")

    def push(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[OutputEvent]:
        clock.advance(PUSH_S)
        return [TextDelta("a")] * EVENTS

    tracer.time(push)
    tracer.admitted(CacheReport(recomputed_tokens=5))
    for _ in tracer.push([1], ()):
        clock.advance(WRITE_S)
    assert tracer.push == push  # the next step is not measured
    drafts = DraftReport(drafted_tokens=8, accepted_tokens=ACCEPTED)
    tracer.ended(Usage(CacheReport(recomputed_tokens=5), TOKENS, drafts))
    (generation,), steps = trace.generations, TOKENS - ACCEPTED

    assert (generation.detokenise.calls, generation.detokenise.seconds) == (steps, steps * PUSH_S)
    writes = (steps * EVENTS, steps * EVENTS * WRITE_S) if as_generated else (0, 0.0)
    assert trace.written() == writes


def test_a_generation_without_tokens_has_no_times() -> None:
    """Where no token came, nothing is estimated."""
    trace = RequestTrace(TraceIds("req_1", "0" * 32), "POST", "/v1/chat/completions", ManualClock())

    GenerationTracer(trace, "req_1").ended(None)

    assert trace.generations[0].detokenise.calls == 0
    assert trace.written() == (0, 0.0)
