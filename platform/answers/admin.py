"""The answers of `/v1/admin` and of `/v1/quota`."""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent


class Tenant(Answer):
    """One customer."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    status: str
    """`active` or `suspended`."""
    weight: float
    """Its share of the engine while tenants compete."""
    service_tier_ceiling: str
    created_at: int


class TenantKey(Answer):
    """A key of a tenant. `key` is the secret text, which only the answer that made the key has."""

    id: str
    object: Literal["key"] = "key"
    tenant_id: str
    name: str
    redacted: str
    """The key as it may be shown."""
    scopes: tuple[str, ...]
    created_at: int
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """Correct to a minute."""
    key: str | None = absent()


class Quota(Answer):
    """A tenant's limits. None is no limit."""

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


class AuditEntry(Answer):
    """One administrative act."""

    id: str
    object: Literal["audit_entry"] = "audit_entry"
    at: float
    actor: str
    action: str
    """Such as `tenant.created` or `key.rotated`."""
    tenant_id: str | None
    target: str
    """The id of what was changed."""
    details: dict[str, Any]


class DevicePages(Answer):
    """KV pages in device memory, by their state."""

    free: int
    cached: int
    active: int


class HostPages(Answer):
    """KV pages in host memory, by their state."""

    free: int
    cached: int


class Replica(Answer):
    """One engine. Only a `ready` one tells its figures; an `absent` one tells the `reason`."""

    id: str
    object: Literal["replica"] = "replica"
    address: str
    status: Literal["ready", "absent"]
    reason: str | None = absent()
    running_requests: int | None = absent()
    waiting_requests: int | None = absent()
    device_pages: DevicePages | None = absent()
    host_pages: HostPages | None = absent()
    disk_pages: int | None = absent()
    preemptions: int | None = absent()
    resident_adapters: tuple[str, ...] | None = absent()
    max_adapters_in_a_step: int | None = absent()
    """The most distinct adapters that one forward pass has served."""
    generated_tokens: int | None = absent()
    steps: int | None = absent()
