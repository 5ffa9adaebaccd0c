"""The answers of `/v1/admin`, `/v1/usage` and `/v1/quota`."""

from dataclasses import dataclass
from typing import TypedDict

from graftwork.api.sdk.types.base import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant(Answer):
    """One customer. `status`: active, suspended."""

    id: str = ""
    name: str = ""
    status: str = ""
    weight: float = 1.0
    service_tier_ceiling: str = "default"
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey(Answer):
    """A key's record; `key` is the plaintext, there only in the answer that made it."""

    id: str = ""
    name: str = ""
    key: str | None = None
    scopes: tuple[str, ...] | None = None
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota(Answer):
    """A tenant's limits; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_adapters: int | None = None
    max_adapter_bytes: int | None = None
    max_adapter_rank: int | None = None
    max_sessions: int | None = None
    max_device_kv_bytes: int | None = None
    max_host_kv_bytes: int | None = None
    monthly_tokens: int | None = None


class QuotaLimits(TypedDict, total=False):
    """The limits that a quota may set."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent_requests: int | None
    max_adapters: int | None
    max_adapter_bytes: int | None
    max_adapter_rank: int | None
    max_sessions: int | None
    max_device_kv_bytes: int | None
    max_host_kv_bytes: int | None
    monthly_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow(Answer):
    """What one group used; `group` is None for work outside sessions."""

    group: str | None = None
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry(Answer):
    """One administrative act; its further fields are in `raw`."""

    id: str = ""
    at: float = 0.0
    actor: str = ""
    action: str = ""
    tenant_id: str | None = None
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(Answer):
    """One engine; its gauges are in `raw`."""

    id: str = ""
    status: str = ""
    address: str = ""
    running_requests: int = 0
    waiting_requests: int = 0
    max_adapters_in_a_step: int | None = None
    """The most distinct adapters that one forward pass has served."""
