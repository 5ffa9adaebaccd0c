"""Defines principals: who sends a request (a tenant or the administrator), and what the sender may do.

Owns TenantScope, the permission to act for a tenant. Only this module makes one, so a statement that requires one runs
only for an authenticated tenant, or for an administrator. Never holds a secret.
"""

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import IsolationDomain, KeyId, TenantId

TenantScope = NewType("TenantScope", TenantId)
"""Permission to read and write one tenant's rows."""


class Scope(StrEnum):
    """The permissions that a key may have."""

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
    """The sender of a request, who was authenticated by a tenant's key."""

    tenant_id: TenantId
    tenant_name: str
    key_id: KeyId
    weight: float
    """The tenant's weight in fair sharing when the engine is full, above 0."""
    tier_ceiling: str
    """The highest of `SERVICE_TIERS` that this tenant's requests may ask for."""
    scopes: frozenset[str]

    def scope(self) -> TenantScope:
        """Returns the permission to act for this tenant."""
        return TenantScope(self.tenant_id)

    def require(self, scope: Scope) -> None:
        """Checks that the key has this scope. Raises NotPermitted if it does not."""
        if scope not in self.scopes:
            raise NotPermitted(f"This key lacks the scope {str(scope)!r}; use a key that has it.", code="missing_scope")

    def capped_tier(self, asked: str) -> str:
        """Returns the service tier of a request: the tier `asked`, or the tenant's highest tier if that is lower."""
        return min(asked, self.tier_ceiling, key=SERVICE_TIERS.index)

    def isolation(self, pepper: bytes) -> IsolationDomain:
        """Returns the name of the tenant's own domain, whose cached prefixes its requests may share.

        Nobody without the pepper can compute the name.
        """
        return isolation_of(self.tenant_id, pepper)


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    """The holder of the admin key, who may manage the platform but not use inference."""

    name: str = "admin"


def isolation_of(tenant_id: TenantId, pepper: bytes) -> IsolationDomain:
    """Returns the name of a tenant's domain, given its id."""
    return IsolationDomain(hmac.digest(pepper, b"graftwork isolation\0" + tenant_id.encode(), hashlib.sha256))


def scope_of_tenant(_admin: AdminPrincipal, tenant_id: TenantId) -> TenantScope:
    """Returns the permission of an administrator to act for this tenant."""
    return TenantScope(tenant_id)
