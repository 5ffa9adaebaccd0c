"""Who is asking, as the rest of the platform sees it.

Owns the permission to act for a tenant. A `TenantScope` is made here and nowhere else,
so a statement that takes one runs only for a tenant that was authenticated.
Never holds a secret.
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
    """What a key may be used for."""

    INFERENCE = "inference"
    """Completions, sessions and everything they need."""
    ADAPTERS = "adapters"
    """Publishing, promoting and deleting adapters; reading them needs no scope."""
    USAGE = "usage"
    """Reading the tenant's usage and quota."""


ALL_SCOPES = frozenset(str(scope) for scope in Scope)
SERVICE_TIERS = ("flex", "default", "priority")
"""Lowest first. The names are those of `engine.request.ServiceTier`."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant's key that was just authenticated."""

    tenant_id: TenantId
    tenant_name: str
    key_id: KeyId
    weight: float
    """The tenant's weight in fair sharing when the engine is full, above 0."""
    tier_ceiling: str
    """The highest of `SERVICE_TIERS` that this tenant's requests may ask for."""
    scopes: frozenset[str]

    def scope(self) -> TenantScope:
        """Permission to act for this tenant."""
        return TenantScope(self.tenant_id)

    def require(self, scope: Scope) -> None:
        """Raises NotPermitted unless the key carries `scope`."""
        if scope not in self.scopes:
            raise NotPermitted(f"This key lacks the scope {str(scope)!r}; use a key that has it.", code="missing_scope")

    def capped_tier(self, asked: str) -> str:
        """The tier that a request for `asked` gets: `asked`, or the tenant's ceiling if that is lower."""
        return min(asked, self.tier_ceiling, key=SERVICE_TIERS.index)

    def isolation(self, pepper: bytes) -> IsolationDomain:
        """The domain whose cached prefixes this tenant's requests may share: its own, under a name that nobody can
        compute.
        """
        return isolation_of(self.tenant_id, pepper)


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    """The holder of the admin key. It may run the platform, but not inference."""

    name: str = "admin"


def isolation_of(tenant_id: TenantId, pepper: bytes) -> IsolationDomain:
    """The domain of a tenant, by its id alone."""
    return IsolationDomain(hmac.digest(pepper, b"graftwork isolation\0" + tenant_id.encode(), hashlib.sha256))


def scope_of_tenant(_admin: AdminPrincipal, tenant_id: TenantId) -> TenantScope:
    """An administrator's permission to act for any tenant."""
    return TenantScope(tenant_id)
