"""The usage of one request, and sums over many."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from graftwork.platform.ids import KeyId, RequestId, SessionId, TenantId


class UsageGroup(StrEnum):
    """What a summary is grouped by."""

    DAY = "day"
    """Calendar days in UTC, as `2026-11-20`."""
    ADAPTER = "adapter"
    """`name@version`; None is the base model."""
    SESSION = "session"
    """None is work outside sessions."""
    KEY = "key"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """What one request used."""

    request_id: RequestId
    tenant_id: TenantId
    key_id: KeyId
    model: str
    """As the caller named it."""
    adapter: str | None
    """`name@version`; None for the base model."""
    session_id: SessionId | None
    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that was not computed."""
    completion_tokens: int
    at: float
    outcome: str = "completed"
    """`completed`, `cancelled` or `failed`. Generated tokens count in each case."""

    @property
    def day(self) -> str:
        """The calendar day in UTC."""
        return datetime.fromtimestamp(self.at, UTC).date().isoformat()


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """The sum of some requests."""

    group: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
