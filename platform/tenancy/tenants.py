"""Defines the data types for tenants, organisations, API keys, and entries of the audit log."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from graftwork.platform.ids import KeyId, OrganisationId, PersonId, TenantId
from graftwork.platform.keys.keys import redacted


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
    organisation_id: OrganisationId | None = None
    """The organisation whose limits hold for the tenant too."""


@dataclass(frozen=True, slots=True)
class Organisation:
    """A group of tenants that share limits."""

    id: OrganisationId
    name: str
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
    adapters: frozenset[str] | None
    """The models that the key may name, without versions and aliases; None means all."""
    allowed_ips: tuple[str, ...] | None
    """The networks from which the key may be used; None means all."""
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """The time of the key's last use, in unix seconds. The real last use may be up to one minute later."""
    replaced_by: KeyId | None
    """The id of the key that a rotation has made instead of this one."""
    key_hash: bytes = field(repr=False)
    person_id: PersonId | None = None
    """The person who acts in the tenant with this key, whose text nobody has. None for a key of a program."""
    first_key_id: KeyId | None = None
    """The first of the keys that rotations have replaced by one another up to this one; None for that key itself."""

    @property
    def limits_id(self) -> KeyId:
        """The id under which the limits of the key are kept and counted. All keys of one line of rotations share it."""
        return self.first_key_id or self.id

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
    """Empty for a change that concerns no single tenant."""
    target: str
    """The id of the changed object."""
    details: dict[str, Any]
