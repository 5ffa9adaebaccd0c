"""What the engine is asked and what it answers: tokens and digests, never text or tenants."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import NewType

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


MAX_TOP_LOGPROBS = 20
_GREEDY_BELOW = 1e-5


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
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was made before, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off once for each time that it was made, from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt and answer that are above 0 and multiplies those below, from 0.01 to 100."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit); each token once."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one, from 0 to `MAX_TOP_LOGPROBS`; None: no report."""
    choice: int = 0
    """Which of several answers to one prompt this is; each has its own noise under one seed."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken. Temperatures this low draw nothing else, and divide past fp32's range."""
        return self.temperature < _GREEDY_BELOW

    @property
    def counts_tokens(self) -> bool:
        """Whether what was said before changes what may follow."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class GrammarKind(StrEnum):
    """What a grammar's text is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; the text is not read."""
    REGEX = "regex"
    """ECMA-262; the whole answer matches."""
    EBNF = "ebnf"
    """GBNF as xgrammar reads it; the rule is `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """Calls of tools in text; see engine/grammar/structural_tags.py."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What an answer must match."""

    kind: GrammarKind
    text: str
    strict: bool = True
    """Every keyword of a schema is enforced or refused; else what cannot be enforced is let go."""


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


SessionKey = NewType("SessionKey", str)
"""Opaque name of an agent session, unique within its isolation domain."""


@dataclass(frozen=True, slots=True)
class KvLimits:
    """Bytes of cached KV that a party may keep on each tier; None is no limit of its own.

    What exceeds it moves down or out; a request that fits the device is never refused for it.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None


NO_KV_LIMITS = KvLimits()


@dataclass(frozen=True, slots=True)
class SessionUse:
    """The session that a request continues."""

    session: SessionKey
    history_tokens: int = 0
    """Tokens at the start of the prompt that an earlier request of the session has had computed."""


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
    session: SessionUse | None = None
    """None for a request that stands alone; its pages are then kept as long as there is room."""
    kv_limits: KvLimits = NO_KV_LIMITS
    grammar: GrammarSource | None = None
    """What the answer must match; None leaves it free."""
    prediction_token_ids: tuple[int, ...] = ()
    """What the answer is expected to be, in whole or in parts; it is drafted from and changes no answer."""
    public_tokens: int = 0
    """Tokens at the start of the prompt that the operator has declared public: every domain may share their pages."""

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
class TokenLogprobs:
    """How likely the model itself found one chosen token: before grammar, bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first; equal ones in order of token id."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New tokens of one step, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token where they were asked for, otherwise none."""


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


class SessionVerb(StrEnum):
    """What is done with the KV of a session between its turns."""

    HOLD = "hold"
    """A turn has ended: copy its pages down, and lease those on the device while its tools run."""
    PREFETCH = "prefetch"
    """The session will go on soon: bring its pages to the device."""
    SUSPEND = "suspend"
    """It will not go on soon: copy its pages down and give up those on the device."""
    CLOSE = "close"
    """It is over: give up every page that no other session reaches."""
    READ = "read"
    """Change nothing."""


@dataclass(frozen=True, slots=True)
class ToolWait:
    """A tool that a session waits for."""

    tool: str
    expected_ms: float | None = None
    """The client's own guess."""


@dataclass(frozen=True, slots=True)
class SessionTending:
    """One verb on the KV of one session's history."""

    verb: SessionVerb
    session: SessionKey
    isolation: IsolationDomain
    adapters: tuple[AdapterUse, ...]
    token_ids: tuple[int, ...]
    """The history up to the session's head."""
    public_tokens: int = 0
    waits: tuple[ToolWait, ...] = ()
    """With HOLD the tools that were called, with PREFETCH those that have answered."""


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """Where the KV of a session's history is; each token is counted on the nearest tier that has it."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    missing_tokens: int = 0
    """Tokens of whole pages and of the tail that would be recomputed."""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    """Bytes of copies, wherever they are: a page on two tiers counts on both."""
    lease_s: float | None = None
    """Seconds for which the device pages are leased from now; None without a lease."""

    @property
    def num_bytes(self) -> int:
        """Of all copies on all tiers."""
        return self.device_bytes + self.host_bytes + self.disk_bytes


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
    in_flight_pages: int
    """Read or written by a copy."""
    host_free_pages: int
    host_cached_pages: int
    host_in_flight_pages: int
    disk_pages: int
    disk_bytes: int
    disk_corrupt_files: int
    """Dropped, because a checksum or a length was wrong."""
    disk_foreign_files: int
    """Passed over at start: another model's or layout's, or not ours."""
    disk_failures: int
    """Operations that the file system refused."""
    resident_adapters: tuple[str, ...]
    lora_pool_bytes: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    steps: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int
    """Of the cached tokens, those that came from the host."""
    disk_tokens: int
    preemptions: int
    """Running requests that were offloaded to make room."""
    generated_tokens: int
    adapter_loads: int
    drafted_tokens: int
    """Guessed and verified; `accepted_tokens` of them came true, and `forced_tokens` of these were spelled out."""
    accepted_tokens: int
    forced_tokens: int
    max_adapters_in_a_step: int
    """The most distinct adapters that one forward pass has served."""
