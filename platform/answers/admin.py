"""Defines the JSON answers of the routes under `/v1/admin` and of `/v1/quota`.

Owns the names, units and allowed range of a tenant's limits. The server, the SDK and the command line use the class
`Quota` for them.
"""

from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, Field

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.usage import Money


class Tenant(Answer):
    """One customer of the server, called a tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    status: str
    """The state of the tenant: `active` or `suspended`."""
    weight: float
    """The tenant's weight when tenants compete for the engine. A tenant with twice the weight gets twice the share."""
    service_tier_ceiling: str
    organisation_id: str | None
    """The organisation that the tenant belongs to. Null means none."""
    created_at: int


class Organisation(Answer):
    """A group of tenants that share limits."""

    id: str
    object: Literal["organisation"] = "organisation"
    name: str
    created_at: int


class Webhook(Answer):
    """Where the alerts of an organisation or a tenant are sent.

    `secret` is the key of the signatures. Only the answer that sets the webhook has this field.
    """

    id: str
    object: Literal["webhook"] = "webhook"
    owner_id: str
    """The id of the organisation or tenant."""
    url: str
    created_at: int
    secret: str | None = absent()


class TenantErasure(Answer):
    """How far the erasure of a deleted tenant is.

    If `status` is `running`, the server still erases. If it is `done`, nothing of the tenant is left but the token
    counts of its usage, and audit entries.
    """

    object: Literal["tenant.erasure"] = "tenant.erasure"
    tenant_id: str
    status: Literal["running", "done"]
    deleted_at: float | None
    """The time of the deletion, in unix seconds. Null for a tenant that an older version of the server has deleted."""
    erased_at: float | None
    """The time at which the erasure was done, in unix seconds."""


class TenantKey(Answer):
    """An API key of a tenant.

    `key` is the whole key, including its secret. Only the answer that creates the key has this field.
    """

    id: str
    object: Literal["key"] = "key"
    tenant_id: str
    name: str
    redacted: str
    """A short form of the key that is safe to show."""
    scopes: tuple[str, ...]
    adapters: tuple[str, ...] | None
    """The models that the key may name, without versions and aliases. Null means all."""
    allowed_ips: tuple[str, ...] | None
    """The networks from which the key may be used. Null means all."""
    created_at: int
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """The time of the last use, in unix seconds. The real last use may be up to one minute later."""
    replaced_by: str | None
    """The id of the key that a rotation has made instead of this one. This one ends at `expires_at`."""
    person_id: str | None
    """The person who acts with this key, which ends with the person's role. Null for a key that programs send."""
    key: str | None = absent()


MAX_LIMIT = 2**53
"""The largest limit. Every JSON reader keeps integers up to this number exactly."""

Limit = Annotated[int | None, Field(ge=0, le=MAX_LIMIT)]
BUDGET_PATTERN = r"^[0-9]{1,10}(\.[0-9]{1,6})?$"
Budget = Annotated[str | None, Field(pattern=BUDGET_PATTERN)]


class Quota(Answer):
    """The limits of an organisation, a tenant, a key or an end user. If a limit is null, there is no limit. If it is 0,
    nothing is allowed.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    requests_per_minute: Limit = None
    """The most inference requests in any span of 60 seconds."""
    tokens_per_minute: Limit = None
    """The most prompt and completion tokens in any span of 60 seconds. Cached prompt tokens count too."""
    max_concurrent_requests: Limit = None
    """The most answers that are generated at the same time. A request with n choices counts n times."""
    max_adapters: Limit = None
    """The most adapters that the tenant, or all tenants of the organisation together, may have, or that a key or an end
    user may have pushed first.
    """
    max_adapter_bytes: Limit = None
    """The most bytes that the weights of all versions of all these adapters may have together."""
    max_adapter_rank: Limit = None
    """The largest rank of an adapter."""
    max_sessions: Limit = None
    """The most open sessions that the tenant, or all tenants of the organisation together, may have, or that a key or an
    end user may have begun.
    """
    max_device_kv_bytes: Limit = None
    """The most bytes of the cached KV of the tenant, or of all tenants of the organisation together, in the device memory
    of each engine. Above this, their own pages are offloaded. No request is refused.
    """
    max_host_kv_bytes: Limit = None
    """The most bytes of the same in host memory. Above this, their own pages move to disk. No request is refused."""
    max_file_bytes: Limit = None
    """The most bytes of all the tenant's files together. Without this limit, the server's own holds."""
    monthly_tokens: Limit = None
    """The most prompt and completion tokens per calendar month in UTC. Used tokens, and reserved tokens of running
    requests, count together.
    """
    monthly_budget: Budget = None
    """The most that the requests of a calendar month in UTC may cost, as decimal text such as `"100.00"`. The cost of
    what is used, and the highest cost of the tokens of running requests, count together.
    """
    soft_budget: Budget = None
    """The cost of a calendar month from which on an alert is sent to the webhook. No request is refused."""
    currency: Annotated[str | None, Field(pattern=r"^[A-Z]{3}$")] = None
    """The currency of the budgets, such as `USD`. Requests with prices in another currency are refused."""


class QuotaUse(Answer):
    """What the owner of limits uses now. Limits per minute and concurrency are not in it."""

    sessions: int
    """Open sessions: the tenant's, those of all tenants of an organisation, or those that a key or an end user has begun."""
    adapters: int
    """Adapters of the tenant or of the organisation's tenants, or those that a key or an end user has pushed first."""
    adapter_bytes: int
    """The bytes of the weights of all their versions."""
    monthly_tokens: int
    """The prompt and completion tokens of this calendar month in UTC."""
    monthly_costs: tuple[Money, ...]
    """The cost of this month, by currency."""


class OwnerQuota(Quota):
    """The limits of an owner, and what it uses of them."""

    used: QuotaUse | None
    """Null for the limits of each end user. A request that sets limits may send this field back; it changes nothing."""


class QuotaLimits(TypedDict, total=False):
    """The types of keyword arguments that have the same names as the fields of `Quota`. A test compares the names."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent_requests: int | None
    max_adapters: int | None
    max_adapter_bytes: int | None
    max_adapter_rank: int | None
    max_sessions: int | None
    max_device_kv_bytes: int | None
    max_host_kv_bytes: int | None
    max_file_bytes: int | None
    monthly_tokens: int | None
    monthly_budget: str | None
    soft_budget: str | None
    currency: str | None


class AuditEntry(Answer):
    """One entry of the audit log: one action of an administrator."""

    id: str
    object: Literal["audit_entry"] = "audit_entry"
    at: float
    actor: str
    """Who acted: `admin` for the admin key, the id of a key or a person, or a part of the server."""
    actor_name: str | None
    """The e-mail address of a person who acted. Null for others, and for a person who was deleted."""
    action: str
    """The kind of action, such as `tenant.created` or `key.rotated`."""
    tenant_id: str | None
    target: str
    """The id of the changed object."""
    details: dict[str, Any]


class Modes(Answer):
    """The degraded modes: what the operator takes away from all requests while the server has too much to do."""

    object: Literal["modes"] = "modes"
    max_output_tokens: int | None
    """The most tokens of one answer, whatever the request allows. Null sets no limit."""
    suspend_drafts: bool
    """Whether the engine generates without lookup drafts. Answers do not change."""
    refuse_flex: bool
    """Whether requests of the service tier `flex` are refused."""
    changed_at: float | None
    """The time of the last change, in unix seconds. Null if there was none."""


class DevicePages(Answer):
    """The number of KV cache pages in device memory that are free, cached, or in use by requests (active)."""

    free: int
    cached: int
    active: int


class HostPages(Answer):
    """The number of KV cache pages in host memory that are free or cached."""

    free: int
    cached: int


class Replica(Answer):
    """One engine and its present state.

    If the engine answers, the answer has its figures, such as the number of running requests. If `status` is `absent`,
    the engine gets no requests, and `reason` says why. If it is `draining`, the engine only finishes its requests.
    """

    id: str
    object: Literal["replica"] = "replica"
    address: str
    epoch: int | None = absent()
    """Counts the starts of engines under this id; only with a lease."""
    status: Literal["ready", "draining", "absent"]
    reason: str | None = absent()
    generation: int | None = absent()
    """Counts the upgrades of the model or of Graftwork; engines of one generation serve the same. Only in a fleet."""
    version: str | None = absent()
    """The version of Graftwork that the engine runs."""
    fingerprint: str | None = absent()
    """`sha256:…` over the model's files."""
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
