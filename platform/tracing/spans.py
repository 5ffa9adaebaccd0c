"""Makes OpenTelemetry's spans of a traced request, once it has ended.

    POST /v1/chat/completions          the request, a child of the client's span if there is a `traceparent`
    ├── authenticate … finish          its stages
    └── generate support@3             one for each answer
        └── engine                     one for each stay at an engine
            ├── queue                  the engine's spans
            │   └── adapter_load
            ├── prefill
            └── decode

Uses the API alone, and only times that were noted before, so a request that runs pays nothing for it. Attributes are ids,
counts and names of models: never text or token ids.
"""

from collections.abc import Callable, Mapping

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer

from graftwork.platform.tracing import gen_ai
from graftwork.platform.tracing.request_trace import EngineRun, GenerationTrace, RequestTrace, Span
from graftwork.platform.tracing.timeline import INSIDE_QUEUE, run_start_s

Attributes = Mapping[str, str | int | float]

_SERVER_FAULTS = 500
_NAMES = {f"{name}_s": f"graftwork.engine.{name}_seconds" for name in ("busy", "mask", "draft")}
"""The attributes whose names are not `graftwork.engine.` and the name of the figure."""


class RequestSpans:
    """Exports the requests of one gateway."""

    def __init__(self, tracer: Tracer, choose_trace_id: Callable[[int], None], *, with_gen_ai: bool) -> None:
        """`choose_trace_id` sets the id of the next trace that `tracer` begins."""
        self._tracer = tracer
        self._choose_trace_id = choose_trace_id
        self._with_gen_ai = with_gen_ai

    def export(self, trace: RequestTrace) -> None:
        """Makes and ends the spans of a request that has ended, if it is traced."""
        if not trace.is_traced:
            return
        self._choose_trace_id(int(trace.ids.trace_id, 16))
        of_request = self._tracer.start_span(
            f"{trace.method} {_route_of(trace)}",
            _parent_of(trace),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(trace),
            start_time=_at(trace, 0.0),
        )
        if trace.status is not None and trace.status >= _SERVER_FAULTS:
            of_request.set_status(Status(StatusCode.ERROR))
        below = otel.set_span_in_context(of_request, Context())
        for stage, start_s, end_s in trace.stages():
            self._span(trace, stage.label, (start_s, end_s), below, {})
        for generation in trace.generations:
            self._generation(trace, generation, below)
        of_request.end(_at(trace, trace.total_s))

    def _generation(self, trace: RequestTrace, generation: GenerationTrace, parent: Context) -> None:
        attributes: dict[str, str | int | float] = {
            "graftwork.generation.id": generation.generation_id,
            "graftwork.drafted_tokens": generation.drafted_tokens,
            "graftwork.accepted_tokens": generation.accepted_tokens,
            "graftwork.detokenise_seconds": generation.detokenise.seconds,
        }
        attributes |= {f"graftwork.prompt_tokens.{tier}": n for tier, n in generation.prompt_tokens_by_tier.items()}
        if generation.miss_reason is not None:
            attributes["graftwork.cache.miss_reason"] = generation.miss_reason
        name = "generate"
        if self._with_gen_ai:
            attributes |= gen_ai.attributes(trace, generation)
            name = gen_ai.operation(trace)
        times = _from(trace, generation.sent_at), _from(trace, generation.ended_at)
        below = self._span(trace, f"{name} {trace.adapter or trace.model}", times, parent, attributes)
        for run in generation.runs:
            self._run(trace, generation, run, below)

    def _run(self, trace: RequestTrace, generation: GenerationTrace, run: EngineRun, parent: Context) -> None:
        start_s = run_start_s(trace, generation, run)
        end_s = max((start_s + span.start_s + span.duration_s for span in run.spans), default=start_s)
        below = self._span(trace, "engine", (start_s, end_s), parent, {})
        inside_queue = below
        for span in sorted(run.spans, key=lambda span: span.name in INSIDE_QUEUE):
            times = start_s + span.start_s, start_s + span.start_s + span.duration_s
            parent_span = inside_queue if span.name in INSIDE_QUEUE else below
            made = self._span(trace, span.name, times, parent_span, _figures(span))
            if span.name == "queue":
                inside_queue = made

    def _span(
        self, trace: RequestTrace, name: str, times: tuple[float, float], parent: Context, attributes: Attributes
    ) -> Context:
        """Makes a span and ends it. `times` are its start and its end in seconds since the request came. Returns the
        context for the spans below it.
        """
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=_at(trace, times[0]))
        span.end(_at(trace, times[1]))
        return otel.set_span_in_context(span, Context())


def _parent_of(trace: RequestTrace) -> Context:
    parent = trace.ids.parent
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    of_client = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags)
    return otel.set_span_in_context(NonRecordingSpan(of_client), Context())


def _request_attributes(trace: RequestTrace) -> Attributes:
    found: dict[str, str | int | None] = {
        "http.request.method": trace.method,
        "url.path": trace.path,
        "http.response.status_code": trace.status,
        "graftwork.request.id": trace.ids.request_id,
        "graftwork.client_request.id": trace.ids.client_request_id,
        "graftwork.tenant.id": trace.tenant_id,
        "graftwork.key.id": trace.key_id,
        "graftwork.session.id": trace.session_id,
        "graftwork.turn.id": trace.work_id,
        "graftwork.model": trace.model,
        "graftwork.adapter": trace.adapter,
        "graftwork.outcome": trace.outcome,
    }
    return {name: value for name, value in found.items() if value is not None}


def _figures(span: Span) -> Attributes:
    return {_NAMES.get(name, f"graftwork.engine.{name}"): value for name, value in span.figures.items()}


def _route_of(trace: RequestTrace) -> str:
    """Returns the path without the id of its session, so that requests of one route share a name."""
    return trace.path if trace.session_id is None else trace.path.replace(trace.session_id, "{session_id}")


def _from(trace: RequestTrace, at: float | None) -> float:
    return trace.total_s if at is None else at - trace.began_at


def _at(trace: RequestTrace, since_s: float) -> int:
    """Returns a time in nanoseconds since the Unix epoch."""
    return int((trace.created_at + since_s) * 1e9)
