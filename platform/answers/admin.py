"""Defines the answers of `/v1/admin` and of `/v1/quota`.

Owns the names, units and range of a tenant's limits. The server, the SDK and the command line take them from `Quota`.
"""

from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, Field

from graftwork.platform.answers.base import Answer, absent


class Tenant(Answer):
    """A tenant: one customer of the server."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    status: str
    """The state of the tenant: `active` or `suspended`."""
    weight: float
    """The tenant's weight when tenants compete for the engine. Twice the weight gives twice the share."""
    service_tier_ceiling: str
    created_at: int


class TenantKey(Answer):
    """A tenant's API key. `key` is the secret text. Only the answer that creates or rotates the key has it."""

    id: str
    object: Literal["key"] = "key"
    tenant_id: str
    name: str
    redacted: str
    """A short form of the key that is safe to show."""
    scopes: tuple[str, ...]
    created_at: int
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """The time of the last use. The real last use may be up to one minute later."""
    key: str | None = absent()


MAX_LIMIT = 2**53
"""The largest limit. Every JSON reader keeps integers up to this number exactly."""

Limit = Annotated[int | None, Field(ge=0, le=MAX_LIMIT)]


class Quota(Answer):
    """A tenant's limits. Null means no limit, and 0 allows nothing."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    requests_per_minute: Limit = None
    """Inference requests in any span of 60 seconds."""
    tokens_per_minute: Limit = None
    """Prompt and completion tokens in any span of 60 seconds. Cached tokens count too."""
    max_concurrent_requests: Limit = None
    """Answers that are generated at the same time: a request with n choices counts n times."""
    max_adapters: Limit = None
    """Adapters that the tenant may keep."""
    max_adapter_bytes: Limit = None
    """Bytes of all versions of all the tenant's adapters together."""
    max_adapter_rank: Limit = None
    """The largest rank of an adapter."""
    max_sessions: Limit = None
    """Open sessions."""
    max_device_kv_bytes: Limit = None
    """Bytes of cached KV on the device. Above it, the tenant's own pages are offloaded. No request is refused."""
    max_host_kv_bytes: Limit = None
    """Bytes of cached KV on the host. Above it, the tenant's own pages move to the disk. No request is refused."""
    monthly_tokens: Limit = None
    """Tokens per calendar month in UTC. Spent tokens and those of running requests together never pass this limit."""


class QuotaLimits(TypedDict, total=False):
    """The limits of `Quota` as keyword arguments. A test checks that the names are the same."""

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
    """One entry of the audit log: what an administrator did."""

    id: str
    object: Literal["audit_entry"] = "audit_entry"
    at: float
    actor: str
    action: str
    """The kind of action, such as `tenant.created` or `key.rotated`."""
    tenant_id: str | None
    target: str
    """The id of the changed object."""
    details: dict[str, Any]


class DevicePages(Answer):
    """The number of KV pages in device memory, by state."""

    free: int
    cached: int
    active: int


class HostPages(Answer):
    """The number of KV pages in host memory, by state."""

    free: int
    cached: int


class Replica(Answer):
    """One engine. A `ready` engine has load figures. An `absent` engine has only a `reason`."""

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
    """The highest number of different adapters in one forward pass so far."""
    generated_tokens: int | None = absent()
    steps: int | None = absent()
