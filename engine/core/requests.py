"""What the engine is asked and what it answers: tokens and digests, never text or tenants."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.ids import IsolationDomain, RequestId


class ServiceTier(StrEnum):
    """The class a request is admitted in; a higher one goes first."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


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
    """Calls of tools in text; see engine/grammar/schema/structural_tags.py."""


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
"""Opaque name of an agent session, unique within its domain."""


@dataclass(frozen=True, slots=True)
class KvLimits:
    """Bytes of cached KV that a domain may keep on each tier; None is no limit of its own.

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
    domain: IsolationDomain
    """Requests of one domain share cached prefixes, under the same adapters, and one fair share of the engine."""
    adapters: tuple[AdapterUse, ...] = ()
    """None for the base model, one for an adapter, up to `MAX_MIXTURE` for a mixture whose deltas are summed."""
    tier: ServiceTier = ServiceTier.DEFAULT
    weight: float = 1.0
    """Of the domain's fair share, relative to other domains."""
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
