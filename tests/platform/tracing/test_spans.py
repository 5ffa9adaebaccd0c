"""Tests of OpenTelemetry's spans of a request, with the SDK and its exporter in memory."""

import os
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import KeyId, SessionId, TenantId
from graftwork.platform.tracing.gen_ai import SCHEMA_URL
from graftwork.platform.tracing.otel_sdk import open_export, open_otlp
from graftwork.platform.tracing.request_trace import Span, Stage
from graftwork.platform.tracing.trace_book import TraceBook

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def exported(
    *, traceparent: str | None = None, traced: bool = True, gen_ai: bool = False, status: int = 200
) -> list[ReadableSpan]:
    """The spans of one chat of a session, in the order in which they ended."""
    clock, exporter = ManualClock(), InMemorySpanExporter()
    book = TraceBook(clock, "gateway_1")
    book.exports.append(open_export(SimpleSpanProcessor(exporter), "gateway_1", with_gen_ai=gen_ai).spans.export)
    headers = [(b"x-graftwork-trace", b"1")] if traced else []
    if traceparent is not None:
        headers.append((b"traceparent", traceparent.encode()))
    trace = book.begin("req_1", {"method": "POST", "path": "/v1/sessions/ses_1/turns", "headers": headers})
    book.authenticated(trace, TenantId("ten_1"), KeyId("key_1"))
    trace.keep()
    trace.describe("support", "support@3", SessionId("ses_1"), "turn_1")
    for stage in (Stage.AUTHENTICATE, Stage.BODY, Stage.START):
        clock.advance(0.25)
        trace.mark(stage)
    generation = trace.generation("turn_1")
    generation.prompt_tokens_by_tier = {"device": 16, "host": 0, "disk": 0, "recomputed": 8}
    generation.completion_tokens = 6
    spans = [
        Span("adapter_load", 0.25, 0.5, {}),
        Span("queue", 0.0, 1.0, {}),
        Span("prefill", 1.0, 0.5, {"steps": 1, "tokens": 8}),
        Span("decode", 1.5, 2.0, {"steps": 5, "tokens": 5, "busy_s": 1.5}),
    ]
    generation.add_spans(7, clock.monotonic(), spans)
    for stage, seconds in ((Stage.QUEUE, 1.0), (Stage.PREFILL, 0.5), (Stage.DECODE, 2.0)):
        clock.advance(seconds)
        trace.mark(stage)
    generation.ended_at = clock.monotonic()
    clock.advance(0.25)
    trace.settle("completed")
    trace.answered(status)
    return list(exporter.get_finished_spans())


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_one_trace_from_http_to_the_engines_steps() -> None:
    """A request is one trace: the stages and the answer below it, the engine below the answer, its spans below that."""
    spans = exported()

    ids = {span.context.span_id: span for span in spans if span.context is not None}
    (root,) = [span for span in spans if span.parent is None]
    assert (root.name, root.kind) == ("POST /v1/sessions/{session_id}/turns", SpanKind.SERVER)
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 1

    def path(span: ReadableSpan) -> str:
        above = parent_id(span)
        return span.name if above is None else f"{path(ids[above])} > {span.name}"

    paths = {path(span).removeprefix(f"{root.name} > ") for span in spans}
    assert {"authenticate", "body", "start", "queue", "prefill", "decode", "finish"} <= paths
    below = "generate support@3 > engine"
    assert {f"{below} > queue", f"{below} > queue > adapter_load", f"{below} > prefill", f"{below} > decode"} <= paths


def test_times_are_those_that_were_noted() -> None:
    """Each span lies within its parent, and the lengths are those of the clocks."""
    spans = exported()
    ids = {span.context.span_id: span for span in spans if span.context is not None}

    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        if (above := parent_id(span)) is not None:
            parent = ids[above]
            assert parent.start_time is not None
            assert parent.end_time is not None
            assert parent.start_time - 1000 <= span.start_time <= span.end_time <= parent.end_time + 1000
    (root,) = [span for span in spans if span.parent is None]
    assert root.start_time is not None
    assert root.end_time is not None
    assert (root.end_time - root.start_time) / 1e9 == pytest.approx(4.5, abs=1e-5)


def test_the_clients_trace_goes_on() -> None:
    """The request is a child of the span in `traceparent`, in its trace."""
    (root,) = [span for span in exported(traceparent=f"00-{TRACE}-{PARENT}-01") if span.kind is SpanKind.SERVER]

    assert root.context is not None
    assert root.context.trace_id == int(TRACE, 16)
    assert parent_id(root) == int(PARENT, 16)


def test_a_request_that_is_not_traced_has_no_spans() -> None:
    """Nothing is exported for it."""
    assert exported(traced=False) == []


def test_attributes_say_who_and_how_much() -> None:
    """The request's span names tenant, key, model and outcome; the engine's have their figures."""
    spans = exported()
    (root,) = [span for span in spans if span.parent is None]
    engine = [span for span in spans if span.name == "decode"][-1]  # the first one is the gateway's stage

    assert root.attributes is not None
    assert root.attributes["graftwork.tenant.id"] == "ten_1"
    assert root.attributes["graftwork.key.id"] == "key_1"
    assert root.attributes["graftwork.adapter"] == "support@3"
    assert root.attributes["graftwork.outcome"] == "completed"
    assert root.attributes["http.response.status_code"] == 200
    assert dict(engine.attributes or {}) == {
        "graftwork.engine.steps": 5,
        "graftwork.engine.tokens": 5,
        "graftwork.engine.busy_seconds": 1.5,
    }


def test_a_failure_of_the_server_is_an_error() -> None:
    """A status of 500 marks the request's span; a 4xx is the client's and does not, as the conventions say."""
    for status, code in ((500, StatusCode.ERROR), (404, StatusCode.UNSET)):
        (root,) = [span for span in exported(status=status) if span.parent is None]
        assert root.status.status_code is code


def test_the_conventions_of_generative_ai_are_opt_in() -> None:
    """Without the setting no attribute begins with `gen_ai`; with it the answer's span has those of the pinned version."""
    plain = [name for span in exported() for name in span.attributes or {}]
    (answer,) = [span for span in exported(gen_ai=True) if span.name == "chat support@3"]

    assert not [name for name in plain if name.startswith("gen_ai")]
    assert answer.instrumentation_scope is not None
    assert answer.instrumentation_scope.schema_url == SCHEMA_URL
    found = {name: value for name, value in (answer.attributes or {}).items() if name.startswith("gen_ai")}
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "graftwork",
        "gen_ai.request.model": "support",
        "gen_ai.response.model": "support@3",
        "gen_ai.conversation.id": "ses_1",
        "gen_ai.usage.input_tokens": 24,
        "gen_ai.usage.output_tokens": 6,
    }


def test_the_names_are_opentelemetrys() -> None:
    """Each attribute of ours that begins with `gen_ai` is in OpenTelemetry's own list."""
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    used = {name for span in exported(gen_ai=True) for name in span.attributes or {} if name.startswith("gen_ai")}
    assert used <= known


def test_a_wrong_address_is_refused() -> None:
    """An address without http is refused before anything is sent."""
    with pytest.raises(InvalidRequest, match="http://collector:4318"):
        open_otlp("collector:4317", "gateway_1", with_gen_ai=False)


def test_without_the_extra_the_error_says_what_to_install() -> None:
    """A gateway without the SDK names the extra."""
    program = (
        "import sys; sys.modules['opentelemetry.sdk.trace.export'] = None\n"
        "from graftwork.platform.tracing.otel_sdk import open_otlp\n"
        "try: open_otlp('http://collector:4318', 'g', with_gen_ai=False)\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)

    assert "pip install 'graftwork[otel]'" in done.stdout
