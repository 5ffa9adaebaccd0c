"""Makes a trace of a request's timeline that Perfetto and chrome://tracing load.

The form is Chrome's Trace Event Format: complete events (`ph` is `X`) with times in microseconds, in a lane (`tid`) for
the gateway, one for each run at an engine, and one for totals, and metadata events (`M`) that name the lanes.
What is known only as a sum, such as the time of all masks, has a bar in the lane of totals: these stand one after
another, so only their lengths mean something.
"""

from collections.abc import Iterator
from typing import Any

from graftwork.platform.answers.timelines import EngineRun, EngineSpan, GenerationTimeline, Timeline

_PROCESS = 1
_GATEWAY = 1
_TOTALS = 2


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the content of the file."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(timeline)), "otherData": {"request_id": timeline.id}}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _name("process_name", _GATEWAY, f"graftwork {timeline.id}")
    yield _name("thread_name", _GATEWAY, "gateway")
    summary = {
        "status": timeline.status,
        "http_status": timeline.http_status,
        "model": timeline.model,
        "adapter": timeline.adapter,
        "trace_id": timeline.trace_id,
    }
    yield _complete(f"{timeline.method} {timeline.path}", _GATEWAY, 0.0, timeline.total_ms, summary)
    yield from _totals(timeline)
    for stage in timeline.stages:
        yield _complete(stage.name, _GATEWAY, stage.start_ms, stage.duration_ms, {})
    lane = _TOTALS
    for generation in timeline.generations:
        for run in generation.engines:
            lane += 1
            yield _name("thread_name", lane, f"engine {generation.id}")
            yield _complete("engine", lane, run.start_ms, _length_ms(run), _prompt(generation))
            # Of two events that begin together, viewers nest the one that comes later and is not longer.
            for span in sorted(run.spans, key=lambda span: (span.start_ms, -span.duration_ms, span.inside is not None)):
                yield _complete(span.name, lane, span.start_ms, span.duration_ms, _arguments(span))


def _totals(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yields one bar for each sum: masks and drafts of a span, detokenising of an answer, writes to the network."""
    sums = [
        (f"{what} of {span.name}", took_ms, {"count": count})
        for generation in timeline.generations
        for run in generation.engines
        for span in run.spans
        for what, took_ms, count in (("masks", span.mask_ms, span.masks), ("drafts", span.draft_ms, span.drafted))
        if took_ms is not None
    ]
    sums += [
        ("detokenise", one.detokenise_ms, {"count": one.detokenise_calls})
        for one in timeline.generations
        if one.detokenise_ms is not None
    ]
    if timeline.write_ms is not None:
        sums.append(("network", timeline.write_ms, {"count": timeline.writes}))
    if sums:
        yield _name("thread_name", _TOTALS, "totals")
    start_ms = 0.0
    for name, took_ms, counted in sums:
        yield _complete(name, _TOTALS, start_ms, took_ms, counted)
        start_ms += took_ms


def _length_ms(run: EngineRun) -> float:
    return max((span.start_ms + span.duration_ms for span in run.spans), default=run.start_ms) - run.start_ms


def _prompt(generation: GenerationTimeline) -> dict[str, Any]:
    """Returns where the KV of the prompt was found, by tier, and why the rest was not."""
    return {} if generation.prompt is None else {"prompt": generation.prompt.body()}


def _arguments(span: EngineSpan) -> dict[str, Any]:
    shown = span.body()
    return {name: value for name, value in shown.items() if name not in ("name", "inside", "start_ms", "duration_ms")}


def _complete(name: str, lane: int, start_ms: float, duration_ms: float, arguments: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(start_ms * 1000, 3), "dur": round(duration_ms * 1000, 3)}
    return {"name": name, "cat": "graftwork", "ph": "X", **times, "pid": _PROCESS, "tid": lane, "args": arguments}


def _name(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": lane, "args": {"name": name}}
