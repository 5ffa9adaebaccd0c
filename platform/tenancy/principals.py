"""Defines principals: the authenticated sender of a request (a tenant or the administrator), and what the sender may
do.

Owns TenantScope, the permission to act for one tenant. Only this module makes a TenantScope, and only for an
authenticated tenant or for the administrator. So a SQL statement that requires a TenantScope never runs for anybody
else. Never holds a secret.
"""

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import IsolationDomain, KeyId, TenantId
from graftwork.platform.tenancy.idempotency import TurnClaim

TenantScope = NewType("TenantScope", TenantId)
"""Permission to read and write one tenant's rows."""


class Scope(StrEnum):
    """The permissions that a tenant's API key can have."""

    INFERENCE = "inference"
    """Allows a key to use completions, sessions and everything that these need."""
    ADAPTERS = "adapters"
    """Allows a key to publish, promote and delete adapters. Reading adapters needs no scope."""
    USAGE = "usage"
    """Allows a key to read the tenant's usage and quota."""


ALL_SCOPES = frozenset(str(scope) for scope in Scope)
SERVICE_TIERS = ("flex", "default", "priority")
"""The service tiers, lowest first. The names are those of `engine.core.requests.ServiceTier`."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request, who has authenticated with an API key of a tenant."""

    tenant_id: TenantId
    tenant_name: str
    key_id: KeyId
    weight: float
    """The tenant's weight, above 0. When the engine is full, tenants share it by their weights."""
    tier_ceiling: str
    """The highest of `SERVICE_TIERS` that this tenant's requests may ask for."""
    scopes: frozenset[str]
    turn_claim: TurnClaim | None = field(default=None, compare=False)
    """The idempotency key of the sender's request, which the turn that it starts records; None without a key."""

    def scope(self) -> TenantScope:
        """Returns the permission to read and write this tenant's rows."""
        return TenantScope(self.tenant_id)

    def require(self, scope: Scope) -> None:
        """Raises NotPermitted if the sender's API key does not have this permission."""
        if scope not in self.scopes:
            raise NotPermitted(f"This key lacks the scope {str(scope)!r}; use a key that has it.", code="missing_scope")

    def capped_tier(self, asked: str) -> str:
        """Returns the service tier for a request that asks for the tier `asked`.

        The result is `asked`, or the tenant's highest tier if `asked` is above that.
        """
        return min(asked, self.tier_ceiling, key=SERVICE_TIERS.index)

    def isolation(self, pepper: bytes) -> IsolationDomain:
        """Returns the isolation domain of the sender's tenant: requests with the same domain may share cached prefixes.

        The domain is a hash of the tenant's id under `pepper`, a secret key. So nobody can compute it without the
        pepper.
        """
        return isolation_of(self.tenant_id, pepper)


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    """The holder of the admin key. The administrator may manage the platform, but may not use inference."""

    name: str = "admin"


def isolation_of(tenant_id: TenantId, pepper: bytes) -> IsolationDomain:
    """Returns the isolation domain of a tenant: requests with the same domain may share cached prefixes.

    The domain is a hash of the tenant's id under `pepper`, a secret key.
    """
    return IsolationDomain(hmac.digest(pepper, b"graftwork isolation\0" + tenant_id.encode(), hashlib.sha256))


def scope_of_tenant(_admin: AdminPrincipal, tenant_id: TenantId) -> TenantScope:
    """Returns the permission to read and write one tenant's rows, for the administrator."""
    return TenantScope(tenant_id)
