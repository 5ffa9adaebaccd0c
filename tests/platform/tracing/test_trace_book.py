"""Tests of the traces that a gateway keeps."""

from typing import Any

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import KeyId, SessionId, TenantId
from graftwork.platform.tracing.request_trace import MAX_GENERATIONS, RequestTrace, Span, Stage
from graftwork.platform.tracing.timeline import timeline_of
from graftwork.platform.tracing.trace_book import TraceBook
from graftwork.platform.tracing.trace_rules import Switches, TraceRules

ACME, GLOBEX = TenantId("ten_acme"), TenantId("ten_globex")


def scope(**headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"method": "POST", "path": "/v1/chat/completions", "headers": pairs}


def kept(book: TraceBook, request_id: str, tenant_id: TenantId = ACME, **headers: str) -> RequestTrace:
    """A request of a tenant that has begun its work."""
    trace = book.begin(request_id, scope(**headers))
    book.authenticated(trace, tenant_id, KeyId("key_1"))
    trace.keep()
    return trace


def test_stages_follow_each_other() -> None:
    """The stages of a request begin at 0, each where the one before ended, and sum to the whole."""
    clock = ManualClock()
    trace = kept(TraceBook(clock), "req_1")
    for stage, seconds in ((Stage.AUTHENTICATE, 0.5), (Stage.BODY, 0.25), (Stage.ENCODE, 1.0), (Stage.QUEUE, 2.0)):
        clock.advance(seconds)
        trace.mark(stage)
    clock.advance(4.0)
    trace.answered(200)
    clock.advance(100.0)

    timeline = timeline_of(trace, "gateway_1")
    assert [(one.name, one.start_ms, one.duration_ms) for one in timeline.stages] == [
        ("authenticate", 0, 500),
        ("body", 500, 250),
        ("encode", 750, 1000),
        ("queue", 1750, 2000),
        ("prefill", 3750, 4000),
    ]
    assert timeline.total_ms == sum(stage.duration_ms for stage in timeline.stages) == 7750


def test_a_stage_that_comes_again_changes_no_later_one() -> None:
    """With several prompts, a stage that ends again extends itself, and one that is over stays so."""
    clock = ManualClock()
    trace = kept(TraceBook(clock), "req_1")
    for stage in (Stage.PREPARE, Stage.ENCODE, Stage.PREPARE, Stage.ENCODE):
        clock.advance(1.0)
        trace.mark(stage)
    trace.answered(200)

    assert [(stage, end_s - start_s) for stage, start_s, end_s in trace.stages()][:2] == [
        (Stage.PREPARE, 1.0),
        (Stage.ENCODE, 3.0),
    ]


def test_a_request_runs_until_nobody_works_for_it() -> None:
    """A turn that goes on after its answer is running until its end, and the end is told once."""
    trace, ends = kept(TraceBook(ManualClock()), "turn"), list[RequestTrace]()
    trace.at_end(ends.append)
    trace.hold()
    trace.answered(202)
    assert timeline_of(trace, "").status == "running"
    assert ends == []

    trace.settle("completed")
    trace.release()

    assert timeline_of(trace, "").status == "completed"
    assert ends == [trace]


def test_a_tenant_finds_only_its_own_requests() -> None:
    """By whatever id, another tenant's request is as unknown as one that never was."""
    book = TraceBook(ManualClock())
    trace = kept(book, "req_1", x_request_id="order-17")
    trace.describe("support", "support@3", SessionId("ses_1"), "turn_1")

    for name in ("req_1", "order-17", "turn_1"):
        assert book.find(name, ACME) is trace
        assert book.find(name, GLOBEX) is None
    assert book.find("req_2", ACME) is None
    assert book.find("turn_1") is trace


def test_two_tenants_may_use_one_id() -> None:
    """Two tenants that give their requests the same id each find their own."""
    book = TraceBook(ManualClock())
    one, other = (kept(book, f"req_{tenant}", tenant, x_request_id="1") for tenant in (ACME, GLOBEX))

    assert book.find("1", ACME) is one
    assert book.find("1", GLOBEX) is other


def test_a_busy_tenant_pushes_out_only_its_own() -> None:
    """Of one tenant, so many requests are kept; the oldest go, with all their ids, and those of others stay."""
    book = TraceBook(ManualClock(), of_tenant=3)
    quiet = kept(book, "req_quiet", GLOBEX)
    for number in range(10):
        kept(book, f"req_{number}", x_request_id=f"order-{number}")

    assert len(book) == 4
    assert book.find("req_quiet", GLOBEX) is quiet
    assert [number for number in range(10) if book.find(f"req_{number}", ACME)] == [7, 8, 9]
    assert [number for number in range(10) if book.find(f"order-{number}", ACME)] == [7, 8, 9]


def test_all_tenants_together_are_bounded() -> None:
    """With many tenants, the oldest requests of all go."""
    book = TraceBook(ManualClock(), most=5)
    for number in range(20):
        kept(book, f"req_{number}", TenantId(f"ten_{number}"))

    assert len(book) == 5
    assert book.find("req_15") is not None
    assert book.find("req_14") is None


def test_a_deleted_tenant_is_forgotten() -> None:
    """Nothing of it can be found, and others keep theirs."""
    book = TraceBook(ManualClock())
    kept(book, "req_1")
    kept(book, "req_2", GLOBEX)
    book.forget(ACME)

    assert book.find("req_1") is None
    assert book.find("req_2") is not None


def test_a_request_with_many_answers_is_bounded() -> None:
    """Only the first answers have a trace of their own."""
    trace = kept(TraceBook(ManualClock()), "req_1")
    for choice in range(100):
        trace.generation(f"req_1.{choice}")

    assert len(trace.generations) == MAX_GENERATIONS


def test_the_engine_stands_where_its_fastest_report_says() -> None:
    """Of reports that were on their way for 30, 10 and 20 ms, the second places the engine's clock."""
    clock = ManualClock()
    trace = kept(TraceBook(clock), "req_1", x_graftwork_trace="1")
    generation = trace.generation("req_1.0")
    clock.advance(0.002)
    arrived_at = clock.monotonic()
    for sent_s, late_s in ((1.0, 0.03), (2.0, 0.01), (3.0, 0.02)):
        generation.add_spans(7, arrived_at + sent_s + late_s - sent_s, [Span("decode", sent_s - 1, 1.0, {"steps": 8})])
    trace.answered(200)

    (run,) = timeline_of(trace, "").generations[0].engines
    assert run.start_ms == pytest.approx(12, abs=0.01)
    assert [span.start_ms for span in run.spans] == pytest.approx([12, 1012, 2012], abs=0.01)


def test_an_answer_that_moves_has_two_runs() -> None:
    """Spans of another run are shown apart."""
    trace = kept(TraceBook(ManualClock()), "req_1")
    generation = trace.generation("req_1.0")
    generation.add_spans(7, 1.0, [Span("queue", 0.0, 1.0, {})])
    generation.add_spans(9, 3.0, [Span("queue", 0.0, 2.0, {})])

    assert [len(run.spans) for run in timeline_of(trace, "").generations[0].engines] == [1, 1]


@pytest.mark.parametrize(
    ("headers", "is_traced"),
    [
        ({}, False),
        ({"x_graftwork_trace": "1"}, True),
        ({"x_graftwork_trace": "0", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, False),
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, True),
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}, False),
    ],
)
def test_who_is_traced(headers: dict[str, str], is_traced: bool) -> None:
    """The client's wish counts first, then the trace that it records."""
    book = TraceBook(ManualClock(), rules=TraceRules(follows_parent=True))

    assert kept(book, "req_1", ACME, **headers).is_traced is is_traced


def test_a_switched_tenant_or_session_is_traced() -> None:
    """The operator's switches name tenants and sessions; other requests are not traced."""
    book = TraceBook(ManualClock(), rules=TraceRules(switches=Switches({ACME, "ses_1"})))
    of_tenant, of_session, other = kept(book, "1"), kept(book, "2", GLOBEX), kept(book, "3", GLOBEX)
    of_session.describe("tiny", None, SessionId("ses_1"), "turn_1")
    other.describe("tiny", None, SessionId("ses_2"), "turn_2")

    assert (of_tenant.is_traced, of_session.is_traced, other.is_traced) == (True, True, False)


def test_a_share_is_traced() -> None:
    """A share of 1 traces all, and one of 0 none."""
    for share, traced in ((1.0, True), (0.0, False)):
        assert kept(TraceBook(ManualClock(), rules=TraceRules(share)), "req_1").is_traced is traced


def test_a_wrong_header_is_refused() -> None:
    """The error names the header and what it may be."""
    with pytest.raises(InvalidRequest, match="send 1, 0") as caught:
        kept(TraceBook(ManualClock()), "req_1", x_graftwork_trace="yes")

    assert caught.value.param == "x-graftwork-trace"
