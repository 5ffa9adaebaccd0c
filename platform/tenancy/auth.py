"""Authentication: tenants' keys open the tenant routes, the admin key opens the admin routes.

Owns the difference between a wrong key (401) and the wrong kind of key (403).
"""

import hashlib
import hmac

from graftwork.platform.errors import NotAuthenticated, NotPermitted
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal
from graftwork.platform.tenancy.tenancy import Tenancy


class Authenticator:
    """Turns a bearer token into the principal that holds it."""

    def __init__(self, tenancy: Tenancy, admin_key: str) -> None:
        self._tenancy = tenancy
        self._admin_digest = _digest(admin_key)

    async def authenticate(self, token: str) -> Principal:
        """Authenticate a tenant's key.

        Raises NotAuthenticated; NotPermitted for the admin key and for suspended tenants.
        """
        if self._is_admin(token):
            raise NotPermitted("The admin key cannot be used here; use a tenant's key.", code="wrong_key_kind")
        return await self._tenancy.authenticate(token)

    async def authenticate_admin(self, token: str) -> AdminPrincipal:
        """Authenticate the admin key. Raises NotAuthenticated; NotPermitted for a tenant's key."""
        if self._is_admin(token):
            return AdminPrincipal()
        try:
            await self._tenancy.authenticate(token)
        except NotAuthenticated as error:
            raise NotAuthenticated("This admin key is not valid; check that it was copied whole.") from error
        raise NotPermitted("A tenant's key cannot be used here; use the admin key.", code="wrong_key_kind")

    def _is_admin(self, token: str) -> bool:
        return hmac.compare_digest(_digest(token), self._admin_digest)


def _digest(text: str) -> bytes:
    """A digest, so that the compared values always have the same length."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
