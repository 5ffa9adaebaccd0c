"""What the engine says of a running request: admitted, tokens, finished. It knows no text."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum

from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


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

    @classmethod
    def sum_of(cls, reports: "Iterable[CacheReport]") -> "CacheReport":
        """The token counts of several prompts together, without a miss reason."""
        counted = list(reports)
        return cls(
            device_tokens=sum(report.device_tokens for report in counted),
            host_tokens=sum(report.host_tokens for report in counted),
            disk_tokens=sum(report.disk_tokens for report in counted),
            recomputed_tokens=sum(report.recomputed_tokens for report in counted),
        )


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


EngineEvent = PromptAdmitted | TokensGenerated | RequestFinished
"""In this order: one PromptAdmitted, any number of TokensGenerated, one RequestFinished; or an error raised."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An event of one request, or the error that ended it."""

    request_id: RequestId
    event: EngineEvent | GraftworkError

    @property
    def is_last(self) -> bool:
        """Whether the request has ended with it."""
        return isinstance(self.event, RequestFinished | GraftworkError)
