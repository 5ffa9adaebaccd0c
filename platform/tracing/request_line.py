"""Makes the fields of the line that the log has for each request: who, what, how many tokens, how long each stage took.

Never has text or token ids.
"""

from typing import Any

from graftwork.platform.tracing.request_trace import RequestTrace


def request_fields(trace: RequestTrace) -> dict[str, Any]:
    """Returns the fields of a request that has ended. Those that do not apply are left out."""
    ids = trace.ids
    fields: dict[str, Any] = {
        "request_id": ids.request_id,
        "method": trace.method,
        "path": trace.path,
        "status": trace.status,
        "seconds": round(trace.total_s, 4),
        "trace_id": ids.trace_id,
    }
    optional = {
        "client_request_id": ids.client_request_id,
        "tenant_id": trace.tenant_id,
        "key_id": trace.key_id,
        "session_id": trace.session_id,
        "turn_id": trace.work_id,
        "model": trace.model,
        "adapter": trace.adapter,
        "outcome": trace.outcome,
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    return fields | (_work(trace) if trace.model is not None else {})


def _work(trace: RequestTrace) -> dict[str, Any]:
    """Returns the tokens of all answers, and the milliseconds of each stage."""
    tokens: dict[str, int] = {}
    for generation in trace.generations:
        for name, count in generation.prompt_tokens_by_tier.items():
            tokens[name] = tokens.get(name, 0) + count
        tokens["completion"] = tokens.get("completion", 0) + generation.completion_tokens
    stages = {stage.label: round((end_s - start_s) * 1000, 2) for stage, start_s, end_s in trace.stages()}
    return {"tokens": tokens, "stages_ms": stages}
