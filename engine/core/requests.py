"""Defines the request that a gateway sends to the engine.

Owns the parts of a request, and the limits of a mixture (several adapters in one request). A request has token ids and
adapter digests, never text or tenants. Invariant: a request never changes. The scheduler keeps the progress of a
request in a RequestState.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.ids import IsolationDomain, RequestId


class ServiceTier(StrEnum):
    """The service class of a request. Requests of a higher class are admitted first."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


class GrammarKind(StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object. The grammar's text is ignored."""
    REGEX = "regex"
    """An ECMA-262 pattern. The pattern must match the whole answer."""
    EBNF = "ebnf"
    """A grammar in GBNF as xgrammar reads it. The start rule is `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """A description of text with tool calls in it; see engine/grammar/schema/structural_tags.py."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The text of a grammar that the answer must match, and the text's language."""

    kind: GrammarKind
    text: str
    strict: bool = True
    """If True, a schema keyword that cannot be enforced is refused. If False, it is ignored."""


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """How the model's reasoning is told from its answer. The grammar of a request holds behind the reasoning."""

    open_token_id: int
    """The tag before the reasoning."""
    close_token_id: int
    """The tag behind it. Until then, the answer cannot end by a stop token."""
    is_open: bool = False
    """Whether the prompt ends inside the reasoning. Otherwise the answer's first token may open it."""
    max_tokens: int | None = None
    """The most tokens of reasoning, without the tags: after so many, the next token is the closing tag. None sets no
    limit. 0 allows none.
    """
    gap_token_ids: tuple[int, ...] = ()
    """Tokens one of which may stand between the closing tag and the answer, whatever the grammar is."""


@dataclass(frozen=True, slots=True, order=True)
class AdapterUse:
    """One adapter version that a request uses, and its weight."""

    digest: str
    """`sha256:…` of the adapter version."""
    weight: float = 1.0
    """The factor by which the adapter's delta is multiplied."""


MAX_MIXTURE = 4
"""The most adapters of one request."""


MAX_CACHE_TTL_S = 3600.0
"""The longest time, in seconds, for which a request may ask to keep the pages of its prompt."""


MAX_MIXTURE_WEIGHT = 16.0
"""The largest absolute weight of an adapter."""


SessionKey = NewType("SessionKey", str)
"""An agent session's name, unique within its isolation domain. The engine does not interpret it."""


KvGroupKey = NewType("KvGroupKey", bytes)
"""Names isolation domains that share limits of KV, such as the tenants of one organisation. It is a digest."""


@dataclass(frozen=True, slots=True)
class KvLimits:
    """How many bytes of cached KV one isolation domain may keep on each tier, and all domains of its group together.

    None means no limit. If a domain or a group exceeds a limit, some of its pages move to a lower tier or are dropped. A
    request is never refused because of these limits.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    group: KvGroupKey | None = None
    """The group of the domain; None for a domain that shares no limit."""
    group_device_bytes: int | None = None
    group_host_bytes: int | None = None


NO_KV_LIMITS = KvLimits()


KV_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvFileKey:
    """The key with which an engine encrypts the KV files of an isolation domain. Its repr and its errors hide it.

    The gateway derives it and sends it with requests. The engine keeps it in memory, and never writes it.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KV_KEY_BYTES:
            raise ValueError(f"the key of KV files has {len(self.secret)} bytes in place of {KV_KEY_BYTES}")


@dataclass(frozen=True, slots=True)
class SessionUse:
    """The session that a request belongs to, and how much of the prompt the session has computed before."""

    session: SessionKey
    history_tokens: int = 0
    """Tokens at the start of the prompt that an earlier request of the session has computed."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue, with its sampling parameters, its adapters and its KV limits."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    domain: IsolationDomain
    """Requests of one domain share cached prefixes (under the same adapters) and one fair share of the engine."""
    adapters: tuple[AdapterUse, ...] = ()
    """The adapters of the request: none for the base model, or up to `MAX_MIXTURE`, whose deltas are added up."""
    tier: ServiceTier = ServiceTier.DEFAULT
    weight: float = 1.0
    """The weight of the isolation domain's fair share of the engine, relative to other domains."""
    session: SessionUse | None = None
    """The session that this request continues; None for a request outside sessions. The pages of such a request stay
    cached until their room is needed.
    """
    kv_limits: KvLimits = NO_KV_LIMITS
    kv_key: KvFileKey | None = None
    """Encrypts the domain's KV files from now on; None changes nothing."""
    cache_ttl_s: float | None = None
    """For how many seconds after this request another request is likely to begin with its prompt: above 0, up to
    `MAX_CACHE_TTL_S`. For this time, the full pages of the prompt are evicted after pages without a lease (see
    engine/kv/prompt_leases.py). None asks for nothing. Has no effect on a request with a session.
    """
    grammar: GrammarSource | None = None
    """The grammar that the answer must match; None allows any answer."""
    reasoning: ReasoningRule | None = None
    """How far the answer's reasoning goes; None holds the whole answer to the grammar."""
    pooling: Pooling | None = None
    """Asks for the embedding of the prompt. Such a request generates nothing: its `max_tokens` must be 0."""
    prediction_token_ids: tuple[int, ...] = ()
    """The expected answer, in whole or in parts. Drafts are taken from it. The prediction does not change the answer.
    """
    emitted_token_ids: tuple[int, ...] = ()
    """Tokens of the answer that an earlier run of this request has generated. The engine goes on after them and does not
    report them again.
    """
    public_tokens: int = 0
    """Tokens at the start of the prompt that the operator declares public: all isolation domains share their pages."""

    deadline_s: float | None = None
    """Seconds from the request's arrival at the engine to its first token, above 0. The engine refuses a request that
    cannot have its first token so soon, and ends a request that has waited too long for that. None sets no deadline.
    """
    uses_lookups: bool = True
    """Whether tokens may be drafted from the prompt, from earlier answers and from the prediction. Drafts that a grammar
    dictates are made in any case. Answers do not depend on it.
    """

    traced: bool = False
    """Whether the engine reports the times of the request's steps, as StepsTraced."""

    timeout_s: float | None = None
    """The most seconds of the whole request, with its time in the queue; None sets no limit. The client of the engine
    keeps this limit, and cancels the request: it is not sent.
    """

    @property
    def adapter_digests(self) -> tuple[str, ...]:
        return tuple(use.digest for use in self.adapters)
