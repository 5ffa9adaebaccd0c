"""Defines what the engine reports about a request: its admission, its new tokens, and its end.

Owns the events and the figures in them. Events hold token ids, never text. Invariant: the events of a request are one
PromptAdmitted, then any number of PromptScored, then one PromptEmbedded if the request asks for it, then any number of
TokensGenerated, then one RequestFinished. If an error ends the request, no event follows. A traced request also has StepsTraced, anywhere before its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter

from graftwork.engine.core.step_spans import EngineSpan
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


class FinishReason(StrEnum):
    """Why a request ended normally. If a request does not end normally, it ends with a GraftworkError."""

    STOP = "stop"
    """The model sampled a stop token, which is the last token."""
    LENGTH = "length"
    """`max_tokens` were generated, or the context is full."""


class MissReason(StrEnum):
    """Why the cache did not have the KV of some part of a prompt."""

    NEVER_CACHED = "never_cached"
    EVICTED_PRESSURE = "evicted_pressure"
    EVICTED_QUOTA = "evicted_quota"
    LEASE_EXPIRED = "lease_expired"
    ADAPTER_CHANGED = "adapter_changed"
    HISTORY_EDITED = "history_edited"
    RESTARTED = "restarted"


@dataclass(frozen=True, slots=True)
class CacheReport:
    """For how many tokens of a prompt the KV was cached, by tier (device, host, disk), and for how many it was not.

    The KV of the others must be computed. Each token counts once. `cached_tokens` is the sum over the tiers.
    """

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

    @classmethod
    def sum_of(cls, reports: "Iterable[CacheReport]") -> "CacheReport":
        """Adds up the token counts of the reports of several prompts. The sum has no miss reason."""
        counted = list(reports)
        return cls(
            device_tokens=sum(report.device_tokens for report in counted),
            host_tokens=sum(report.host_tokens for report in counted),
            disk_tokens=sum(report.disk_tokens for report in counted),
            recomputed_tokens=sum(report.recomputed_tokens for report in counted),
        )


@dataclass(frozen=True, slots=True)
class PromptAdmitted:
    """The first event of a request. The request has left the queue and starts to run."""

    cache: CacheReport
    adapter_bytes: int = 0
    """Bytes of the request's adapters that were loaded to the device since the last request that used them began. So each
    load is in the report of one request.
    """


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability that the model gave one token, before grammar, bias, penalties and temperature change it."""

    logprob: float
    """The natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...] = ()
    """Pairs (token, logprob) of the likeliest tokens, likeliest first. Equally likely tokens are sorted by token id."""
    rank: int | None = None
    """The token's place among all tokens in the order of `top`; 1 is the likeliest. Known only for prompt tokens."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The log probabilities of further tokens of the prompt, in order, if the request asked for them.

    All events of a request together have one entry for each token of the prompt except the first, which follows
    nothing.
    """

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PromptEmbedded:
    """The embedding of the prompt, if the request asked for one."""

    values: bytes
    """[hidden] in float32, little-endian, not normalised."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """The tokens that one step has added to a request's answer, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token if the request asked for log probabilities, else empty."""
    kv_byte_seconds: int = 0
    """Bytes of device pages that the request held, times seconds, since the last event that reported some. Pages that it
    shares with others count whole.
    """
    engine_us: int = 0
    """The request's share of the time of steps since the last event, in microseconds: the duration of each step, times
    the request's tokens in it, divided by all tokens in it.
    """


@dataclass(frozen=True, slots=True)
class DraftReport:
    """How many tokens of one answer were drafted, and how many of those were accepted.

    Also counts the tokens of the prediction (the expected answer that the client sent with the request).
    """

    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Draft tokens that became part of the answer."""
    forced_tokens: int = 0
    """Accepted draft tokens that the request's grammar dictated."""
    accepted_prediction_tokens: int = 0
    """Tokens of the request's prediction that are part of the answer, drafted or not."""
    rejected_prediction_tokens: int = 0
    """Tokens of the request's prediction that are not part of the answer."""

    @classmethod
    def sum_of(cls, reports: "Iterable[DraftReport]") -> "DraftReport":
        """Adds up the token counts of the reports of several answers."""
        return cls(*map(sum, zip(*map(_draft_counts, [cls(), *reports]), strict=True)))


_draft_counts = attrgetter(*(field.name for field in fields(DraftReport)))
"""Returns the counts of a report. `astuple` would copy each of them, for every request."""


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a request that ended normally."""

    reason: FinishReason
    completion_tokens: int
    drafts: DraftReport = DraftReport()
    kv_byte_seconds: int = 0
    """What no event before has reported; see TokensGenerated. So is the next field."""
    engine_us: int = 0


@dataclass(frozen=True, slots=True)
class StepsTraced:
    """The spans of a traced request that have ended since the last report, in order."""

    run: int
    """Identifies the request's stay at one engine. A request that moves to another engine begins another run."""
    sent_s: float
    """When the engine reported this, in seconds since the request arrived there."""
    spans: tuple[EngineSpan, ...]


EngineEvent = PromptAdmitted | PromptScored | PromptEmbedded | TokensGenerated | StepsTraced | RequestFinished


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An event of one request, or the error that ended the request."""

    request_id: RequestId
    event: EngineEvent | GraftworkError

    @property
    def is_last(self) -> bool:
        """Whether this is the last output of the request."""
        return isinstance(self.event, RequestFinished | GraftworkError)
