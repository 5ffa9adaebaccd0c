"""Defines the data types for tenants, their API keys, entries of the audit log, and usage records."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import KeyId, RequestId, SessionId, TenantId
from graftwork.platform.tenancy.keys import redacted


class TenantStatus(StrEnum):
    """The state of a tenant. A deleted tenant keeps its row, because its usage records refer to it."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of the platform, called a tenant. A tenant can see only its own objects."""

    id: TenantId
    name: str
    """A name for people. Two tenants may have the same name."""
    status: TenantStatus
    weight: float
    service_tier_ceiling: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Erasure:
    """How far the erasure of a deleted tenant is. Times are in Unix seconds."""

    tenant_id: TenantId
    deleted_at: float | None
    """None for a tenant that an older version of the server has deleted."""
    erased_at: float | None
    """The time at which nothing was left; None while the tenant is being erased."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key as the server stores it: with a hash instead of the secret."""

    id: KeyId
    tenant_id: TenantId
    name: str
    public_id: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """The time of the key's last use, in unix seconds. The real last use may be up to one minute later."""
    key_hash: bytes = field(repr=False)

    @property
    def redacted(self) -> str:
        """The form of the API key that may be shown, without its secret: `gw_<public id>_…`."""
        return redacted(self.public_id)

    def is_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log: which administrator changed which object of which tenant, and how. It contains no
    secret.
    """

    id: str
    at: float
    actor: str
    action: str
    """The kind of action: `tenant.created`, `key.rotated`, …"""
    tenant_id: TenantId
    target: str
    """The id of the changed object."""
    details: dict[str, Any]


class UsageOutcome(StrEnum):
    """How a request ended, as its usage record says."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client left or cancelled the request, or the tenant or key lost its access. Generated tokens are billed."""
    FAILED = "failed"
    """The request itself was at fault. Generated tokens are billed."""
    SERVER_ERROR = "server_error"
    """The server was at fault. Nothing is billed: the record has no tokens."""
    INTERRUPTED = "interrupted"
    """The gateway died. Of a turn, the tokens of the stored events are billed; of other requests, those in the journal."""

    @property
    def is_billed(self) -> bool:
        return self is not UsageOutcome.SERVER_ERROR

    @classmethod
    def of_error(cls, error: GraftworkError) -> "UsageOutcome":
        """Returns the outcome of a request that ended with `error`."""
        return cls.SERVER_ERROR if error.is_server_fault else cls.FAILED


class UsageGroup(StrEnum):
    """The ways in which usage records can be grouped before they are added up."""

    DAY = "day"
    """Groups by calendar day in UTC, as `2026-11-20`."""
    ADAPTER = "adapter"
    """Groups by adapter version, as `name@version`. The group None is the base model."""
    SESSION = "session"
    """Groups by session id. The group None is all requests without a session."""
    KEY = "key"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """A usage record: the token counts of one request, and who sent it for which model."""

    request_id: RequestId
    tenant_id: TenantId
    key_id: KeyId
    model: str
    """The `model` of the request, as the caller named it."""
    adapter: str | None
    """`name@version`; None for the base model."""
    session_id: SessionId | None
    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that was found in the cache."""
    completion_tokens: int
    at: float
    outcome: UsageOutcome = UsageOutcome.COMPLETED

    @property
    def day(self) -> str:
        """The calendar day of the request in UTC, as `2026-11-20`."""
        return datetime.fromtimestamp(self.at, UTC).date().isoformat()


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """The total usage of one group of requests, such as the requests of one day."""

    group: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
