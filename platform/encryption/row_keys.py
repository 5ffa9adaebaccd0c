"""Finds the keys with which the content of rows is encrypted, in the transaction that reads or writes the rows.

Owns the ciphers that this process remembers. Never makes, wraps or stores a key: TenantKeys does. A transaction that runs
whole on a thread of its own only uses a remembered cipher: to find another one may take long, so it is left to the event
loop's thread (`MustWait`).
Invariants: a key that a transaction has made serves that transaction alone until it is committed. A key that another
process has destroyed is forgotten after `REMEMBERED_S`; one that this process destroys, at once.
"""

from collections import OrderedDict

from graftwork.platform.clock import Clock
from graftwork.platform.contents.rows import PLAIN_ROWS, RowOpener, RowSealer, attach_row_content
from graftwork.platform.database import Database, MustWait, ReadSession, WriteSession, may_wait
from graftwork.platform.encryption.row_cipher import EncryptedRows
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant

REMEMBERED_S = 60.0
"""Seconds for which a data key is used without reading its row in the database again."""
_MAX_REMEMBERED = 1_000
_MADE = "made_row_keys"


class RowKeys:
    """The ciphers of all tenants' rows."""

    def __init__(self, keys: TenantKeys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._known: OrderedDict[TenantId, tuple[EncryptedRows, float]] = OrderedDict()
        """By tenant: its cipher, and until when it may be used, on the monotonic clock."""
        keys.when_destroyed(self._forget)

    async def sealer(self, session: WriteSession, tenant_id: TenantId) -> RowSealer:
        """Returns what encrypts a tenant's content. Makes the tenant's data key if it has none.

        Raises NotPermitted if the tenant is deleted and has no key, and Unavailable.
        """
        found = await self._find(session, tenant_id)
        if found is None:
            found = EncryptedRows(await self._keys.make_within(session, _scope(tenant_id)), tenant_id)
            session.info.setdefault(_MADE, {})[tenant_id] = found
        return found

    async def opener(self, session: ReadSession, tenant_id: TenantId) -> RowOpener:
        """Returns what decrypts a tenant's content. Without a data key, there is only plain content to read."""
        return await self._find(session, tenant_id) or PLAIN_ROWS

    async def _find(self, session: ReadSession, tenant_id: TenantId) -> EncryptedRows | None:
        made: EncryptedRows | None = session.info.get(_MADE, {}).get(tenant_id)
        if made is not None:
            return made
        known = self._known.get(tenant_id)
        is_known = known is not None and self._clock.monotonic() < known[1]
        if not may_wait(session):  # on another thread, which changes nothing here
            if known is None or not is_known:
                raise MustWait
            return known[0]
        if known is not None and is_known:
            self._known.move_to_end(tenant_id)
            return known[0]
        key = await self._keys.find_within(session, _scope(tenant_id))
        if key is None:
            self._known.pop(tenant_id, None)
            return None
        rows = EncryptedRows(key, tenant_id)
        self._known[tenant_id] = rows, self._clock.monotonic() + REMEMBERED_S
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        return rows

    def _forget(self, tenant_id: TenantId) -> None:
        self._known.pop(tenant_id, None)


def _scope(tenant_id: TenantId) -> TenantScope:
    return scope_of_tenant(AdminPrincipal(), tenant_id)


def encrypt_rows(database: Database, keys: TenantKeys, clock: Clock) -> None:
    """Encrypts content in all sessions that the database opens from now on, if `keys` has master keys."""
    if keys.are_on:
        attach_row_content(database, RowKeys(keys, clock))
