"""Derives the keys with which engines encrypt tenants' KV files, from the tenants' data keys.

    data key of a tenant ──HKDF-SHA256, a fixed label and version──► key of its KV files ──with each request──► engine

Owns the keys that this process has derived, for a minute each. The same tenant has the same key on every gateway. After
the data key was destroyed, nobody can derive the key again.
"""

from collections import OrderedDict

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from graftwork.platform.clock import Clock
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, scope_of_tenant

_LABEL = b"graftwork kv files\0"
_VERSION = 1
"""The version of the derivation. With another one, engines find no KV file that they have written before."""
_KEPT_S = 60.0
_MAX_KEPT = 1_000


def kv_key_of(data_key: bytes) -> bytes:
    """Returns the key of KV files, 32 bytes, that belongs to a data key."""
    return HKDF(SHA256(), 32, None, _LABEL + _VERSION.to_bytes(4, "big")).derive(data_key)


class TenantKvKeys:
    """The keys of the KV files of all tenants."""

    def __init__(self, keys: TenantKeys, clock: Clock) -> None:
        """Raises InvalidRequest if `keys` cannot make data keys, because the server has no master keys."""
        if not keys.can_write:
            raise InvalidRequest(
                "encrypt_kv_files needs master keys: name their file in the setting master_key_file (make it with "
                "`graftwork db master-key create`), or switch encrypt_kv_files off.",
                param="encrypt_kv_files",
            )
        self._keys = keys
        self._clock = clock
        self._kept: OrderedDict[TenantId, tuple[float, bytes]] = OrderedDict()
        keys.when_destroyed(self._forget)

    async def of(self, tenant_id: TenantId) -> bytes:
        """Returns the key of a tenant's KV files, 32 bytes. Makes the tenant's data key if there is none.

        Raises NotPermitted if the tenant was deleted, and Unavailable if the master keys cannot be used now.
        """
        now, kept = self._clock.monotonic(), self._kept.get(tenant_id)
        if kept is not None and now < kept[0]:
            return kept[1]
        data_key = await self._keys.for_writing(scope_of_tenant(AdminPrincipal(), tenant_id))
        assert data_key is not None, "there are master keys"
        key = kv_key_of(data_key)
        self._kept[tenant_id] = now + _KEPT_S, key
        self._kept.move_to_end(tenant_id)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return key

    def _forget(self, tenant_id: TenantId) -> None:
        self._kept.pop(tenant_id, None)
