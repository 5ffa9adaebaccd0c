"""What the engine is asked and what it answers: tokens and digests, never text or tenants."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum

from graftwork.platform.ids import IsolationDomain, RequestId


class ServiceTier(StrEnum):
    """The class a request is admitted in; a higher one goes first."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


class FinishReason(StrEnum):
    """Why a request ended with tokens. A request that ends without is a typed error instead."""

    STOP = "stop"
    """The model sampled a stop token; it is the last of the tokens."""
    LENGTH = "length"
    """`max_tokens` were made, or the context is full."""


class MissReason(StrEnum):
    """Why a prompt's prefix was not in the cache as far as it could have been."""

    NEVER_CACHED = "never_cached"
    EVICTED_PRESSURE = "evicted_pressure"
    EVICTED_QUOTA = "evicted_quota"
    LEASE_EXPIRED = "lease_expired"
    ADAPTER_CHANGED = "adapter_changed"
    HISTORY_EDITED = "history_edited"
    RESTARTED = "restarted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy."""

    max_tokens: int
    """Tokens to make at most, at least 1."""
    temperature: float = 1.0
    """From 0 (greedy) to 2."""
    top_k: int | None = None
    """Keep the k likeliest; None keeps all."""
    top_p: float = 1.0
    """Keep the likeliest whose probabilities sum to this, in (0, 1]."""
    min_p: float = 0.0
    """Drop what is less likely than this share of the likeliest, in [0, 1]."""
    seed: int | None = None
    """Equal seeds give equal outputs, whatever the batch; None draws one."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence tokens."""


@dataclass(frozen=True, slots=True, order=True)
class AdapterUse:
    """One adapter version's part in a request."""

    digest: str
    """`sha256:…` of the adapter version."""
    weight: float = 1.0
    """What its delta is multiplied by."""


MAX_MIXTURE = 4
"""Adapters of one request."""
MAX_MIXTURE_WEIGHT = 16.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    isolation: IsolationDomain
    """Requests share cached prefixes only within one domain (and one adapter: the engine adds that)."""
    adapters: tuple[AdapterUse, ...] = ()
    """None for the base model, one for an adapter, up to `MAX_MIXTURE` for a mixture whose deltas are summed."""
    tier: ServiceTier = ServiceTier.DEFAULT
    share: str = ""
    """Opaque name of the party whose fair share this is charged to."""
    weight: float = 1.0
    """The party's weight against the others."""
    prediction_token_ids: tuple[int, ...] = ()
    """What the answer is expected to be, in whole or in parts; it is drafted from and changes no answer."""

    @property
    def adapter_digests(self) -> tuple[str, ...]:
        return tuple(use.digest for use in self.adapters)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where a prompt's tokens came from; device + host + disk + recomputed = prompt."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    miss_reason: MissReason | None = None

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.recomputed_tokens


@dataclass(frozen=True, slots=True)
class PromptAdmitted:
    """The first event of every request that is served: it has left the queue."""

    cache: CacheReport


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New tokens of one step, in order."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What came of the tokens that were guessed for one answer."""

    drafted_tokens: int = 0
    """Guessed and verified."""
    accepted_tokens: int = 0
    """Of these, part of the answer."""
    forced_tokens: int = 0
    """Of these, spelled out by the constraint that the answer keeps."""
    accepted_prediction_tokens: int = 0
    """Of the request's prediction, part of the answer, whether a step guessed or chose them."""
    rejected_prediction_tokens: int = 0
    """Of the request's prediction, not part of the answer."""

    @classmethod
    def sum_of(cls, reports: "Iterable[DraftReport]") -> "DraftReport":
        """Of several answers."""
        return cls(*map(sum, zip(*map(astuple, [cls(), *reports]), strict=True)))


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a request that ended with tokens."""

    reason: FinishReason
    completion_tokens: int
    drafts: DraftReport = DraftReport()


EngineEvent = PromptAdmitted | TokensGenerated | RequestFinished
"""In this order: one PromptAdmitted, any number of TokensGenerated, one RequestFinished; or an error raised."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What a gateway must know of the model an engine serves."""

    model_name: str
    fingerprint: str
    """`sha256:…` over the checkpoint; part of every adapter's identity."""
    vocab_size: int
    context_tokens: int
    """Prompt and completion together."""
    eos_token_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    biased_targets: tuple[str, ...]
    """LoRA targets that have a bias of their own in the base."""
    target_shapes: dict[str, tuple[int, int]]
    """(out_features, in_features) by LoRA target: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    max_lora_rank: int
    page_tokens: int
    device_pages: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine's counters and gauges."""

    running_requests: int
    waiting_requests: int
    free_pages: int
    """Never written, or written and given back; holds nothing that anyone can match."""
    cached_pages: int
    """Owned by the prefix tree alone: reclaimed on demand."""
    active_pages: int
    """Owned by at least one running sequence."""
    resident_adapters: tuple[str, ...]
    lora_pool_bytes: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    adapter_loads: int
    drafted_tokens: int
    """Guessed and verified; `accepted_tokens` of them came true, and `forced_tokens` of these were spelled out."""
    accepted_tokens: int
    forced_tokens: int
    max_adapters_in_a_step: int
    """The most distinct adapters that one forward pass has served."""
