"""What the engine reports of traced requests, on a real engine over a small random model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from graftwork.engine.core.events import FinishReason, RequestFinished, RequestOutput, StepsTraced, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.core.step_spans import EngineSpan, SpanName
from graftwork.engine.step_recorder import TraceRecorder
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import GraftworkError, InternalFailure
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.engine_driver import EngineDriver, Outcome

MakeEngine = Callable[..., EngineDriver]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def names(outcome: Outcome) -> list[SpanName]:
    return [span.name for span in outcome.spans]


def tiles(spans: Sequence[EngineSpan]) -> list[EngineSpan]:
    """The spans that are not inside others."""
    return [span for span in spans if not span.name.is_inside_queue]


def check_tiled(spans: Sequence[EngineSpan]) -> None:
    """Each span begins where the one before ends, the first one at 0, and steps fit in their span."""
    end_s = 0.0
    for span in tiles(spans):
        assert span.start_s == pytest.approx(end_s, abs=1e-9)
        assert span.duration_s >= 0
        assert span.busy_s <= span.duration_s + 1e-6
        end_s = span.start_s + span.duration_s


def test_a_traced_request_shows_its_queue_its_prefill_and_its_steps(make_engine: MakeEngine) -> None:
    """The spans of a request follow each other, compute each prompt token once and generate each token once."""
    outcome = make_engine().run(PROMPT, traced=True, ignore_eos=True, max_tokens=30)

    check_tiled(outcome.spans)
    assert names(outcome)[0] is SpanName.QUEUE
    assert {*names(outcome)} == {SpanName.QUEUE, SpanName.PREFILL, SpanName.DECODE}
    prefill = [span for span in outcome.spans if span.name is SpanName.PREFILL]
    decode = [span for span in outcome.spans if span.name is SpanName.DECODE]
    assert sum(span.tokens for span in prefill) == len(PROMPT)
    of_prefill = 1 + sum(span.accepted for span in prefill)  # its last step gives the first tokens
    assert of_prefill + sum(span.tokens for span in decode) == len(outcome.token_ids)
    assert all(span.batch_requests == 1 for span in (*prefill, *decode))


def test_a_request_that_is_not_traced_reports_nothing(make_engine: MakeEngine) -> None:
    """Beside a traced request, another one has no spans, and its tokens are those of an engine without traces."""
    driver, alone = make_engine(), make_engine().run(PROMPT)
    traced, untraced = driver.submit([3, 4, 5], traced=True), driver.submit(PROMPT)
    driver.finish()

    assert untraced.spans == []
    assert untraced.token_ids == alone.token_ids
    assert traced.spans


def test_requests_in_one_batch_share_their_steps(make_engine: MakeEngine) -> None:
    """Steps of two requests say so."""
    driver = make_engine()
    outcomes = [
        driver.submit(PROMPT, traced=True, ignore_eos=True),
        driver.submit([3, 4], traced=True, ignore_eos=True),
    ]
    driver.finish()

    for outcome in outcomes:
        check_tiled(outcome.spans)
        assert max(span.batch_requests for span in outcome.spans) == 2


def test_a_long_prompt_has_a_span_for_its_chunks(make_engine: MakeEngine) -> None:
    """A prompt of more tokens than a step is computed in chunks, each with its tokens."""
    outcome = make_engine(max_batch_tokens=4).run(PROMPT, traced=True)

    assert [span.tokens for span in outcome.spans if span.name is SpanName.PREFILL] == [4, 4, 1]


def test_the_load_of_an_adapter_is_inside_the_queue(make_engine: MakeEngine) -> None:
    """A request whose adapter is not loaded shows the wait for it, which ends when the request starts."""
    outcome = make_engine().run(PROMPT, adapter="sha256:wide", traced=True)

    queue, load = (
        next(one for one in outcome.spans if one.name is name) for name in (SpanName.QUEUE, SpanName.ADAPTER_LOAD)
    )
    assert load.start_s >= 0
    assert load.duration_s > 0
    assert load.start_s + load.duration_s <= queue.duration_s + 1e-9


def test_drafts_are_counted(make_engine: MakeEngine) -> None:
    """The drafted and accepted tokens of all spans are those that the engine reports at the end."""
    repeats = PROMPT * 4
    outcome = make_engine().run(repeats, traced=True, ignore_eos=True, max_tokens=40)

    assert sum(span.drafted for span in outcome.spans) == outcome.drafts.drafted_tokens
    assert sum(span.accepted for span in outcome.spans) == outcome.drafts.accepted_tokens
    assert outcome.drafts.drafted_tokens
    assert sum(span.draft_s for span in outcome.spans) > 0


# ---- without an engine ------------------------------------------------------------------------------------------


class Recorded:
    """A recorder, and the reports of one traced request."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.began_at = self.clock.monotonic()
        self.recorder = TraceRecorder(self.clock, lambda request: False, lambda request: False)
        self.request = EngineRequest(
            RequestId("req"), tuple(PROMPT), SamplingParams(max_tokens=4), IsolationDomain(b"x"), traced=True
        )
        self.spans: list[EngineSpan] = []
        self.recorder.arrived(self.request, self.clock.monotonic())

    def step(self, start: int, tokens: int, seconds: float, samples: tuple[SampleSpec, ...] = ()) -> None:
        piece = RequestSlice(self.request.request_id, tuple(range(tokens)), start, (), (), samples)
        plan = StepPlan((piece,))
        self.recorder.launched(plan)
        self.clock.advance(seconds)
        self.recorder.landed(plan)

    def out(self, event: object) -> list[RequestOutput]:
        outputs = self.recorder.attach([RequestOutput(self.request.request_id, event)])  # type: ignore[arg-type]
        for output in outputs:
            if isinstance(output.event, StepsTraced):
                self.spans += output.event.spans
        return outputs


def test_preemption_is_a_span() -> None:
    """The time between the loss of a place and the next start is a span of its own, and the rest goes on after it."""
    recorded = Recorded()
    recorded.clock.advance(1.0)
    recorded.recorder.started(recorded.request.request_id, loads=False)
    recorded.step(0, len(PROMPT), 0.5)
    recorded.out(TokensGenerated((1,)))
    recorded.recorder.preempted(recorded.request.request_id)
    recorded.clock.advance(2.0)
    recorded.recorder.started(recorded.request.request_id, loads=True)
    recorded.clock.advance(0.25)
    recorded.step(len(PROMPT), 1, 0.5)
    recorded.out(TokensGenerated((2,)))
    recorded.out(RequestFinished(FinishReason.LENGTH, 2))

    check_tiled(recorded.spans)
    assert [(span.name, span.duration_s) for span in recorded.spans] == [
        (SpanName.QUEUE, 1.0),
        (SpanName.PREFILL, 0.5),
        (SpanName.PREEMPTED, 2.0),
        (SpanName.KV_LOAD, 0.25),
        (SpanName.DECODE, 0.5),
    ]


def test_an_error_in_the_queue_reports_the_wait() -> None:
    """A request that fails before it starts shows how long it has waited, before its error."""
    recorded = Recorded()
    recorded.clock.advance(3.0)
    outputs = recorded.out(InternalFailure("gone"))

    assert isinstance(outputs[0].event, StepsTraced)
    assert outputs[-1].is_last
    assert [(span.name, span.duration_s) for span in recorded.spans] == [(SpanName.QUEUE, 3.0)]


def test_a_long_answer_has_few_spans() -> None:
    """The spans of an answer of 20,000 steps are bounded, lose no step, and follow each other."""
    recorded, random = Recorded(), Random(1)
    recorded.recorder.started(recorded.request.request_id, loads=False)
    recorded.step(0, len(PROMPT), 0.01)
    recorded.out(TokensGenerated((1,)))
    for number in range(20_000):
        recorded.step(len(PROMPT) + number, 1, random.random())
        recorded.out(TokensGenerated((2,)))
    recorded.out(RequestFinished(FinishReason.LENGTH, 20_001))

    decode = [span for span in recorded.spans if span.name is SpanName.DECODE]
    check_tiled(recorded.spans)
    assert sum(span.steps for span in decode) == sum(span.tokens for span in decode) == 20_000
    assert len(decode) < 80


class SlowMask:
    """A mask that takes a second to fill, as `clock` says."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def fill(self, words: NDArray[np.int32]) -> GraftworkError | None:
        self._clock.advance(1.0)
        words[:] = 7
        return InternalFailure("ends here")


def test_masks_and_drafts_have_their_time() -> None:
    """A span has the seconds of the request's own masks and drafts; a mask does the same whether it is timed or not."""
    recorded, words = Recorded(), np.zeros(2, np.int32)
    recorder, request = recorded.recorder, recorded.request
    recorder.started(request.request_id, loads=False)
    mask = recorder.mask_of(request, SlowMask(recorded.clock))
    assert mask is not None
    failure = mask.fill(words)
    recorder.drafted(request.request_id, 0.25)
    recorder.drafted(RequestId("another"), 100.0)
    recorded.step(len(PROMPT), 1, 0.5, (SampleSpec(request.sampling, seed=1, position=9, mask=mask),))
    recorded.step(len(PROMPT) + 1, 1, 0.5)
    recorded.out(RequestFinished(FinishReason.LENGTH, 2))

    (decode,) = [span for span in recorded.spans if span.name is SpanName.DECODE]
    assert (decode.masks, decode.mask_s, decode.draft_s) == (1, 1.0, 0.25)
    assert isinstance(failure, InternalFailure)
    assert words.tolist() == [7, 7]


def test_the_mask_of_an_untraced_request_is_not_timed() -> None:
    """It stays the same object."""
    recorded = Recorded()
    mask = SlowMask(recorded.clock)

    assert recorded.recorder.mask_of(replace(recorded.request, traced=False), mask) is mask


def test_decode_spans_are_reported_twice_a_second() -> None:
    """In 10 seconds of 1,000 steps a gateway gets at most 21 reports, none is later than half a second and a span of
    steps, and other spans are reported at once.
    """
    recorded = Recorded()
    recorded.recorder.started(recorded.request.request_id, loads=False)
    recorded.step(0, len(PROMPT), 0.01)
    first = recorded.out(TokensGenerated((1,)))
    reports = 0
    for number in range(1000):
        recorded.step(len(PROMPT) + number, 1, 0.01)
        reports += len(recorded.out(TokensGenerated((2,)))) - 1
    known_s = max(span.start_s + span.duration_s for span in recorded.spans)
    recorded.out(RequestFinished(FinishReason.LENGTH, 1001))

    assert [type(output.event) for output in first] == [TokensGenerated, StepsTraced]
    assert 5 <= reports <= 20
    assert recorded.clock.monotonic() - recorded.began_at - known_s < 10.01 / 4 + 0.5
    check_tiled(recorded.spans)
    assert sum(span.steps for span in recorded.spans) == 1001


def test_a_cancelled_request_is_forgotten() -> None:
    """After a cancel, steps that still compute the request report nothing, and nothing is kept."""
    recorded = Recorded()
    recorded.recorder.forget(recorded.request.request_id)
    recorded.step(0, len(PROMPT), 0.1)

    assert len(recorded.out(TokensGenerated((1,)))) == 1
    assert recorded.spans == []
