"""Tells for whom work goes on that was begun with an API key some time ago, such as a batch.

    the key is usable                         the principal of the key, as it is now
    it was rotated, and its successor is      the principal of the successor, which allows the same
    the tenant is suspended                   nobody now: the work waits
    otherwise                                 nobody any more: the work ends

Never sees the key's text: the work was authenticated when it began.
"""

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.tenancy import key_rows, repository
from graftwork.platform.tenancy.principals import Principal, principal_of
from graftwork.platform.tenancy.tenants import ApiKey, TenantStatus

_MOST_ROTATIONS = 100


class KeyStanding:
    """Finds the principals of API keys by their ids."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def principal_of(self, tenant_id: TenantId, key_id: KeyId) -> Principal | None:
        """Returns for whom work of this key goes on now; None while its tenant is suspended.

        Raises NotPermitted with the code `access_ended` if the key was revoked or has expired and has no successor, or if
        its tenant was deleted.
        """
        async with self._database.read() as session:
            tenant = await repository.find_tenant(session, tenant_id)
            key = None if tenant is None else await key_rows.find_key(session, tenant_id, key_id)
            for _ in range(_MOST_ROTATIONS):
                if key is None or self._is_usable(key) or key.replaced_by is None:
                    break
                key = await key_rows.find_key(session, tenant_id, key.replaced_by)
        if tenant is None or key is None or not self._is_usable(key):
            raise NotPermitted(
                "The access of the API key with which this work was begun has ended: it was revoked or has expired, or its "
                "tenant was deleted. Ask the operator.",
                code="access_ended",
            )
        if tenant.status is not TenantStatus.ACTIVE:
            return None
        return principal_of(key, tenant)

    def _is_usable(self, key: ApiKey) -> bool:
        now = self._clock.now()
        return key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
