"""Defines the data types of tenancy: a tenant, its keys, entries of the audit log, and the usage of requests."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from graftwork.platform.ids import KeyId, RequestId, SessionId, TenantId
from graftwork.platform.tenancy.keys import redacted


class TenantStatus(StrEnum):
    """The state of a tenant. The row of a deleted tenant is kept for its usage."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the platform. A tenant can see only its own objects."""

    id: TenantId
    name: str
    """A name for people. Two tenants may have the same name."""
    status: TenantStatus
    weight: float
    service_tier_ceiling: str
    created_at: float


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. Only the holder has the secret."""

    id: KeyId
    tenant_id: TenantId
    name: str
    public_id: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """The time of the key's last use, correct to a minute."""
    key_hash: bytes = field(repr=False)

    @property
    def redacted(self) -> str:
        """The form in which the key may be shown: `gw_<public id>_…`."""
        return redacted(self.public_id)

    def is_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log: which administrator did what, and to which tenant. It holds no secret."""

    id: str
    at: float
    actor: str
    action: str
    """The kind of action: `tenant.created`, `key.rotated`, …"""
    tenant_id: TenantId
    target: str
    """The id of the changed object."""
    details: dict[str, Any]


class UsageGroup(StrEnum):
    """The ways in which a summary of usage may be grouped."""

    DAY = "day"
    """Groups by calendar day in UTC, as `2026-11-20`."""
    ADAPTER = "adapter"
    """Groups by `name@version` of the adapter; None is the base model."""
    SESSION = "session"
    """Groups by session; None is work outside sessions."""
    KEY = "key"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """The usage of one request."""

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
    outcome: str = "completed"
    """`completed`, `cancelled` or `failed`. Generated tokens count in each case."""

    @property
    def day(self) -> str:
        """The calendar day in UTC."""
        return datetime.fromtimestamp(self.at, UTC).date().isoformat()


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """The usage of a group of requests, added up."""

    group: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
