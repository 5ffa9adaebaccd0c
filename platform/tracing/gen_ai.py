"""Names the span attributes of OpenTelemetry's conventions for generative AI, in one pinned version.

The conventions still change between versions, so these attributes are written only if the setting `otel_gen_ai` asks for
them. This is their only home: another version changes this file. None of them has text of a prompt or an answer.
Source: https://github.com/open-telemetry/semantic-conventions/tree/v1.38.0/docs/gen-ai
"""

from typing import Final

from graftwork.platform.tracing.request_trace import GenerationTrace, RequestTrace

VERSION: Final = "1.38.0"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{VERSION}"

PROVIDER: Final = "graftwork"
_CHAT, _TEXT = "chat", "text_completion"
_TEXT_PATHS: Final = frozenset({"/v1/completions"})


def operation(trace: RequestTrace) -> str:
    """Returns the conventions' name of what the request asks for."""
    return _TEXT if trace.path in _TEXT_PATHS else _CHAT


def attributes(trace: RequestTrace, generation: GenerationTrace) -> dict[str, str | int]:
    """Returns the attributes of the span of one answer."""
    tiers = generation.prompt_tokens_by_tier
    found: dict[str, str | int | None] = {
        "gen_ai.operation.name": operation(trace),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.adapter or trace.model,
        "gen_ai.conversation.id": trace.session_id,
        "gen_ai.usage.input_tokens": sum(tiers.values()) if tiers else None,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}
