"""Makes the answer that shows a request's trace.

Owns how the engine's clock is placed on the gateway's: at the latest time at which the request can have arrived at the
engine, but not before it was sent. Never changes a trace.
"""

from typing import Any

from graftwork.platform.answers.timelines import (
    EngineRun,
    EngineSpan,
    GenerationTimeline,
    PromptTiers,
    Timeline,
    TimelineStage,
)
from graftwork.platform.tracing.request_trace import EngineRun as RecordedRun
from graftwork.platform.tracing.request_trace import GenerationTrace, RequestTrace, Span

INSIDE_QUEUE = frozenset({"adapter_load", "grammar_compile"})
"""The engine's spans that lie inside its span `queue`."""
_WHOLE_NUMBERS = ("steps", "tokens", "drafted", "accepted", "masks")
_TIMES = ("busy", "mask", "draft")
_MEANS = ("batch_requests", "batch_tokens")


def timeline_of(trace: RequestTrace, gateway_id: str) -> Timeline:
    """Returns what is known of a request whose tenant is known."""
    assert trace.tenant_id is not None
    assert trace.key_id is not None
    writes, write_s = trace.written() if trace.is_traced else (0, 0.0)
    return Timeline(
        id=trace.ids.request_id,
        client_request_id=trace.ids.client_request_id,
        trace_id=trace.ids.trace_id,
        gateway_id=gateway_id,
        tenant_id=trace.tenant_id,
        key_id=trace.key_id,
        session_id=trace.session_id,
        turn_id=trace.work_id,
        method=trace.method,
        path=trace.path,
        model=trace.model,
        adapter=trace.adapter,
        status=status_of(trace),
        http_status=trace.status,
        created_at=round(trace.created_at, 6),
        total_ms=_ms(trace.total_s),
        traced=trace.is_traced,
        stages=tuple(
            TimelineStage(name=stage.label, start_ms=_ms(start_s), duration_ms=_ms(end_s - start_s))
            for stage, start_s, end_s in trace.stages()
        ),
        generations=tuple(_generation(trace, one) for one in trace.generations),
        write_ms=_ms(write_s) if writes else None,
        writes=writes or None,
    )


def status_of(trace: RequestTrace) -> str:
    """Returns how the request ended, or `running`."""
    if trace.ended_at is None:
        return "running"
    return trace.outcome or "answered"


def _generation(trace: RequestTrace, generation: GenerationTrace) -> GenerationTimeline:
    tiers = generation.prompt_tokens_by_tier
    return GenerationTimeline(
        id=generation.generation_id,
        sent_ms=_since(trace, generation.sent_at),
        admitted_ms=_since(trace, generation.admitted_at),
        first_token_ms=_since(trace, generation.first_token_at),
        ended_ms=_since(trace, generation.ended_at),
        prompt=PromptTiers(**tiers, miss_reason=generation.miss_reason) if tiers else None,
        completion_tokens=generation.completion_tokens,
        drafted_tokens=generation.drafted_tokens,
        accepted_tokens=generation.accepted_tokens,
        detokenise_ms=_ms(generation.detokenise.seconds) if generation.detokenise.calls else None,
        detokenise_calls=generation.detokenise.calls or None,
        engines=tuple(_run(trace, generation, run) for run in generation.runs),
    )


def _run(trace: RequestTrace, generation: GenerationTrace, run: RecordedRun) -> EngineRun:
    start_s = run_start_s(trace, generation, run)
    return EngineRun(start_ms=_ms(start_s), spans=tuple(_span(start_s, span) for span in run.spans))


def run_start_s(trace: RequestTrace, generation: GenerationTrace, run: RecordedRun) -> float:
    """Returns when a run began, in seconds since the request came to the gateway."""
    earliest = trace.began_at if generation.sent_at is None else generation.sent_at
    return max(run.arrived_at, earliest) - trace.began_at


def _span(start_s: float, span: Span) -> EngineSpan:
    figures: dict[str, Any] = {name: int(span.figures[name]) for name in _WHOLE_NUMBERS if name in span.figures}
    figures |= {f"{name}_ms": _ms(span.figures[f"{name}_s"]) for name in _TIMES if f"{name}_s" in span.figures}
    figures |= {name: round(span.figures[name], 2) for name in _MEANS if name in span.figures}
    return EngineSpan(
        name=span.name,
        inside="queue" if span.name in INSIDE_QUEUE else None,
        start_ms=_ms(start_s + span.start_s),
        duration_ms=_ms(span.duration_s),
        **figures,
    )


def _since(trace: RequestTrace, at: float | None) -> float | None:
    return None if at is None else _ms(at - trace.began_at)


def _ms(seconds: float) -> float:
    """Returns milliseconds, to the microsecond."""
    return round(seconds * 1000, 3)
