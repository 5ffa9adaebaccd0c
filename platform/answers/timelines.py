"""Defines the JSON answers about what the server did when: of `GET /v1/requests/{id}/timeline`, and of the switches of
traces.

All times are milliseconds since the request came to the gateway, as floats.
"""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent


class TimelineStage(Answer):
    """One stage of a request at the gateway. Each begins where the one before ends, so that they sum to `total_ms`."""

    name: str
    """`authenticate`, `body`, `prepare`, `encode`, `quota`, `start`, `queue`, `prefill`, `decode` or `finish`."""
    start_ms: float
    duration_ms: float


class EngineSpan(Answer):
    """What the engine did for one answer in a span of time. Those without `inside` follow each other without a gap.

    A figure that is 0 is left out.
    """

    name: str
    """`queue`, `kv_load`, `prefill`, `decode` or `preempted`; inside `queue`: `adapter_load`, `grammar_compile`."""
    inside: str | None = absent()
    start_ms: float
    duration_ms: float
    steps: int | None = absent()
    """The steps that computed the request in this span."""
    busy_ms: float | None = absent()
    """How long these steps took. The rest of the span, the request waited for its next step."""
    tokens: int | None = absent()
    """Prefill: prompt tokens computed; its last step also generates the first token. Decode: tokens generated."""
    batch_requests: float | None = absent()
    """The mean number of requests that shared a step."""
    batch_tokens: float | None = absent()
    """The mean number of tokens that a step computed for all requests."""
    drafted: int | None = absent()
    """Draft tokens verified."""
    accepted: int | None = absent()
    """Draft tokens that became part of the answer."""
    masks: int | None = absent()
    """Grammar masks filled."""
    mask_ms: float | None = absent()
    """How long it took to fill them. On a GPU, the device computes meanwhile."""
    draft_ms: float | None = absent()
    """How long it took to find the drafts."""


class EngineRun(Answer):
    """The stay of an answer at one engine. An answer whose engine was lost has another one."""

    start_ms: float
    spans: tuple[EngineSpan, ...]


class PromptTiers(Answer):
    """Where the KV of the prompt's tokens was found, and why the rest was not."""

    device: int
    host: int
    disk: int
    recomputed: int
    miss_reason: str | None


class GenerationTimeline(Answer):
    """One answer of a request. A time is null until it has come."""

    id: str
    sent_ms: float | None
    admitted_ms: float | None
    first_token_ms: float | None
    ended_ms: float | None
    prompt: PromptTiers | None
    """Null until the engine has admitted the prompt."""
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    detokenise_ms: float | None = absent()
    """How long it took to turn tokens into text and calls: an estimate from some of the steps, of a traced request, as
    `engines`.
    """
    detokenise_calls: int | None = absent()
    engines: tuple[EngineRun, ...] = ()


class Timeline(Answer):
    """What the server did when for one request."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    client_request_id: str | None
    """The `x-request-id` that the client has sent."""
    trace_id: str
    """The id of the request's trace in OpenTelemetry: 32 hexadecimal digits."""
    gateway_id: str
    """The gateway that served the request; each start of a gateway has an id of its own."""
    tenant_id: str
    key_id: str
    session_id: str | None
    turn_id: str | None
    method: str
    path: str
    model: str | None
    adapter: str | None
    """The adapter version, such as `support@3`; null for the base model."""
    status: str
    """`running`, or how the request ended: `completed`, `cancelled`, `failed`, `server_error`, `interrupted`, or
    `answered` if it began no work, such as a request that was refused."""
    http_status: int | None
    created_at: float
    """When the request came, in unix seconds."""
    total_ms: float
    """From the request's arrival to its end, or to now."""
    traced: bool
    """Whether the engine has reported its steps. Without, `engines` are empty."""
    stages: tuple[TimelineStage, ...]
    generations: tuple[GenerationTimeline, ...]
    """The answers, at most 16."""
    write_ms: float | None = absent()
    """How long it took to encode and write a stream's events, with waits for a slow client: an estimate from some of them,
    of a traced request.
    """
    writes: int | None = absent()


class TraceSwitch(Answer):
    """A tenant or a session whose requests are traced."""

    id: str
    """The id of the tenant or of the session."""
    object: Literal["trace_switch"] = "trace_switch"
    token_ids: bool
    """Whether the token ids of its prompts and answers go to the log of token ids."""
    changed_at: float
    """When it was switched on or changed, in unix seconds."""
