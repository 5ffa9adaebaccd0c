"""Defines the request for one generation, or for the embedding of one prompt, and how much KV its tenant may have.

`Generator` runs it.
"""

from dataclasses import dataclass, field

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.requests import NO_KV_LIMITS, KvGroupKey, KvLimits, ServiceTier, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.activity.meter import RequestOwner
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.tenancy.principals import group_of_organisation
from graftwork.platform.tracing.request_trace import NO_TRACE, RequestTrace
from graftwork.sessions.generation.constraints import OutputGrammar
from graftwork.sessions.generation.reasoning import ReasoningAsk


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt that the model continues, with the sampling parameters and the rules for parsing the output."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resolved: ResolvedModel
    isolation: IsolationDomain
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    weight: float = 1.0
    tier: ServiceTier = ServiceTier.DEFAULT
    parse_tool_calls: bool = False
    """Whether tool calls are parsed. If False, all output is text."""
    parallel_tool_calls: bool = True
    """Whether several calls are allowed. If False, the generation ends with its first call."""
    session: SessionUse | None = None
    """The session that the prompt continues."""
    kv_limits: KvLimits = NO_KV_LIMITS
    pooling: Pooling | None = None
    """Asks for the embedding of the prompt, and for no answer; `max_tokens` must be 0."""
    cache_ttl_s: float | None = None
    """For how many seconds another request is likely to begin with this prompt; see EngineRequest."""
    prediction_token_ids: tuple[int, ...] = ()
    """The token ids of the answer that the client expects. They change the speed, never the output."""
    grammar: OutputGrammar | None = None
    """The grammar that the answer must match."""
    stop_logprobs: bool = False
    """Whether a stop token has log-probabilities, if the request asks for any."""
    output_cap: int | None = None
    """The limit of the operator that has lowered `sampling.max_tokens`; None if none has."""
    uses_lookups: bool = True
    """Whether tokens may be drafted by lookups. It never changes the output."""
    owner: RequestOwner | None = None
    """Whose request it is, for the overview of what tenants do; None is counted for nobody."""
    due_at: float | None = None
    """The time on the generator's monotonic clock by which the client wants the first token. None takes the deadline of
    the service tier, if it has one.
    """
    reasoning: ReasoningAsk | None = None
    """What is wanted of the model's reasoning; None means that all output is the answer."""
    trace: RequestTrace = field(default=NO_TRACE, compare=False, repr=False)
    """Where the times of the generation are noted."""


def kv_limits(limits: Limits, pepper: bytes) -> KvLimits:
    """Returns how many bytes of KV a tenant may have on the device and on the host, and all tenants of its organisation
    together, for the engine to enforce.

    The engine knows the organisation by a digest under `pepper`, as it knows tenants.
    """
    own, shared, organisation_id = limits.tenant, limits.organisation, limits.organisation_id
    if (
        shared is None
        or organisation_id is None
        or (shared.max_device_kv_bytes, shared.max_host_kv_bytes) == (None, None)
    ):
        return KvLimits(own.max_device_kv_bytes, own.max_host_kv_bytes)
    return KvLimits(
        own.max_device_kv_bytes,
        own.max_host_kv_bytes,
        KvGroupKey(group_of_organisation(organisation_id, pepper)),
        shared.max_device_kv_bytes,
        shared.max_host_kv_bytes,
    )
