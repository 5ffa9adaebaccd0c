"""A running server sends its traces to a collector by OTLP over HTTP, and the collector decodes the official messages."""

import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from graftwork.platform.tracing.gen_ai import SCHEMA_URL
from tests.end_to_end.conftest import DemoServer, free_port

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_WITHIN_S = 60.0


@dataclass
class Collector:
    """A receiver of OTLP over HTTP: POST /v1/traces with an ExportTraceServiceRequest, gzipped or not."""

    port: int = field(default_factory=free_port)
    exports: list[ExportTraceServiceRequest] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What was sent that a collector would refuse."""
    _news: Condition = field(default_factory=Condition)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for sent in self.exports
            for of in sent.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]

    def take(self, path: str, kind: str | None, body: bytes) -> bytes:
        """Decodes one request. Returns the body of the answer."""
        with self._news:
            if path != "/v1/traces" or kind != "application/x-protobuf":
                self.wrong.append(f"{path} {kind}")
            self.exports.append(ExportTraceServiceRequest.FromString(body))
            self._news.notify_all()
        return ExportTraceServiceResponse().SerializeToString()

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace, once its server span is here: the SDK sends a request's spans together."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace_id.hex() == trace_id]

        with self._news:
            arrived = self._news.wait_for(lambda: any(one.kind == Span.SPAN_KIND_SERVER for one in found()), _WITHIN_S)
        assert arrived, f"no trace {trace_id} arrived"
        return found()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = collector.take(self.path, self.headers.get("content-type"), body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            return

    receiver = ThreadingHTTPServer(("127.0.0.1", collector.port), Handler)
    Thread(target=receiver.serve_forever, daemon=True).start()
    yield collector
    receiver.shutdown()
    receiver.server_close()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """A demo server that exports to the collector."""
    settings = {
        "GRAFTWORK_OTLP_ENDPOINT": collector.address,
        "GRAFTWORK_OTEL_GEN_AI": "true",
        "GRAFTWORK_LOG_FORMAT": "json",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    server = DemoServer(tmp_path_factory.mktemp("otel"), free_port(), settings)
    server.start()
    yield server
    server.stop()


def turn(server: DemoServer, **headers: str) -> tuple[httpx.Response, str]:
    """One turn of a new session with the first adapter, with a call of the engine. Returns the session's id as well."""
    authorization = {"authorization": f"Bearer {server.key('Blackbeard')}"}
    with httpx.Client(base_url=server.url, headers=authorization, timeout=120) as client:
        made = client.post("/v1/sessions", json={"model": "pirate", "sampling": {"max_tokens": 40, "ignore_eos": True}})
        session_id = made.raise_for_status().json()["id"]
        answer = client.post(f"/v1/sessions/{session_id}/turns", json={"input": "Ahoy"}, headers=headers)
        return answer.raise_for_status(), session_id


def attributes(owner: Span | Resource) -> dict[str, Any]:
    """The attributes by name, as plain values."""
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in owner.attributes}


def test_one_trace_from_http_to_the_engines_steps(server: DemoServer, collector: Collector) -> None:
    """The collector gets one trace: below the client's span the request, below it the answer, the engine and its spans,
    each within the time of its parent.
    """
    answer, session_id = turn(server, traceparent=f"00-{TRACE}-{PARENT}-01")
    spans = collector.trace(TRACE)
    ids = {span.span_id: span for span in spans}

    (root,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert root.parent_span_id.hex() == PARENT
    assert root.name == "POST /v1/sessions/{session_id}/turns"
    assert answer.headers["x-graftwork-trace-id"] == TRACE

    def path(span: Span) -> str:
        return span.name if span is root else f"{path(ids[span.parent_span_id])} > {span.name}"

    by_path = {path(span): span for span in spans}
    below = f"{root.name} > chat pirate@1"
    assert {f"{below} > engine > {name}" for name in ("queue", "prefill", "decode")} <= {*by_path}
    assert {f"{root.name} > {name}" for name in ("authenticate", "encode", "queue", "decode", "finish")} <= {*by_path}
    for span in spans:
        if span is not root:
            parent = ids[span.parent_span_id]
            slack_ns = 10_000  # times are rounded
            assert parent.start_time_unix_nano - slack_ns <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= parent.end_time_unix_nano + slack_ns
    steps = [attributes(span).get("graftwork.engine.steps", 0) for span in spans if span.name == "decode"]
    assert sum(steps) > 1
    assert attributes(root)["graftwork.session.id"] == session_id


def test_the_conventions_attributes_arrive(server: DemoServer, collector: Collector) -> None:
    """The answer's span has the attributes of generative AI in the pinned version, with the tokens that were billed."""
    answer, session_id = turn(server, traceparent=f"00-{'a' * 32}-{PARENT}-01")
    (span,) = [span for span in collector.trace("a" * 32) if span.name == "chat pirate@1"]
    found, usage = attributes(span), answer.json()["usage"]

    assert {name: value for name, value in found.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "graftwork",
        "gen_ai.request.model": "pirate",
        "gen_ai.response.model": "pirate@1",
        "gen_ai.conversation.id": session_id,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    scopes = [scope for sent in collector.exports for of in sent.resource_spans for scope in of.scope_spans]
    assert {scope.schema_url for scope in scopes} == {SCHEMA_URL}
    resources = [attributes(of.resource) for sent in collector.exports for of in sent.resource_spans]
    assert {one["service.name"] for one in resources} == {"graftwork"}
    assert all(one["service.version"] and one["service.instance.id"] for one in resources)
    assert collector.wrong == []


def test_the_ids_are_in_the_answer_the_trace_and_the_log(server: DemoServer, collector: Collector) -> None:
    """The client's id, the server's and the trace's are the same in the headers, the root span and the line of the log."""
    answer, _ = turn(server, **{"x-graftwork-trace": "1", "x-request-id": "order-17"})
    trace_id, request_id = answer.headers["x-graftwork-trace-id"], answer.headers["x-graftwork-request-id"]
    (root,) = [span for span in collector.trace(trace_id) if span.kind == Span.SPAN_KIND_SERVER]
    (line,) = lines_of(server.data_dir / "serve.log", request_id)

    assert answer.headers["x-request-id"] == "order-17"
    assert root.parent_span_id == b""
    found = attributes(root)
    assert (found["graftwork.request.id"], found["graftwork.client_request.id"]) == (request_id, "order-17")
    assert (line["trace_id"], line["client_request_id"]) == (trace_id, "order-17")
    assert line["tenant_id"] == found["graftwork.tenant.id"]


def test_a_request_that_nobody_traces_is_not_sent(server: DemoServer, collector: Collector) -> None:
    """A client that does not record its trace, and asks for none, has no spans at the collector."""
    turn(server, traceparent=f"00-{'b' * 32}-{PARENT}-00")
    turn(server, traceparent=f"00-{'c' * 32}-{PARENT}-01")
    collector.trace("c" * 32)  # the later one is here

    assert not any(span.trace_id.hex() == "b" * 32 for span in collector.spans)


def lines_of(log: Path, request_id: str) -> list[dict[str, Any]]:
    """The lines that the log has for a request. Its work may end a moment after its answer."""
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        found = [line for line in lines if line.get("event") == "request" and line["request_id"] == request_id]
        if found:
            return found
    raise AssertionError(f"the log has no line of {request_id}")
