"""What a tenant, one of its keys and an entry of the audit log are."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.tenancy.keys import redacted


class TenantStatus(StrEnum):
    """Where a tenant is in its life. A deleted one is kept as a tombstone for its usage."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the platform: whatever is not its own does not exist for it."""

    id: TenantId
    name: str
    """For people; need not be unique."""
    status: TenantStatus
    weight: float
    service_tier_ceiling: str
    created_at: float


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret, which nobody but its holder has."""

    id: KeyId
    tenant_id: TenantId
    name: str
    public_id: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """Correct to a minute."""
    key_hash: bytes = field(repr=False)

    @property
    def redacted(self) -> str:
        """How the key may be shown: `gw_<public id>_…`."""
        return redacted(self.public_id)

    def is_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what to whom; never with a secret."""

    id: str
    at: float
    actor: str
    action: str
    """`tenant.created`, `key.rotated`, …"""
    tenant_id: TenantId
    target: str
    """The id of what was acted on."""
    details: dict[str, Any]
