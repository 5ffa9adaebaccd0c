"""Keeps one data key for each tenant, wrapped by a master key, and destroys it when the tenant is erased.

Owns the table data_keys, and the keys that this process has unwrapped. Never encrypts anything with them: files and the
content of rows have keys that are derived from them.
Invariants: a tenant has one data key at most, whichever gateways ask for it at the same time. A key that was destroyed
is made never again for what it has encrypted: who reads that gets an error.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.encryption import repository
from graftwork.platform.encryption.master_keys import KEY_BYTES, MasterKeyFile, MasterKeys, WrappedKey
from graftwork.platform.errors import InvalidRequest, NotPermitted, Unavailable
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.repository import hold_tenant

_log = logging.getLogger("graftwork.encryption")

_MAX_REMEMBERED = 1_000
"""Data keys that a process remembers, so that it need not unwrap one for each file."""
_REWRAPPED_PER_QUERY = 100


class TenantKeys:
    """The data keys of all tenants. Without `masters`, encryption is off: there are no keys to write with."""

    def __init__(self, database: Database, clock: Clock, masters: MasterKeys | None) -> None:
        self._database = database
        self._clock = clock
        self._masters = masters
        self._known: OrderedDict[TenantScope, tuple[WrappedKey, bytes]] = OrderedDict()
        self._when_destroyed: list[Callable[[TenantScope], None]] = []

    @property
    def are_on(self) -> bool:
        """Whether there are master keys, so that what is written is encrypted."""
        return self._masters is not None

    def when_destroyed(self, forget: Callable[[TenantScope], None]) -> None:
        """Calls `forget` when this process destroys the data key of a tenant."""
        self._when_destroyed.append(forget)

    @property
    def can_write(self) -> bool:
        """Whether encryption is on: there are master keys that wrap new data keys."""
        return self._masters is not None

    async def check(self) -> None:
        """Checks that every data key can be unwrapped, by one of each master key. Call it at start.

        Raises InvalidRequest if there are data keys and no master keys, or others.
        """
        async with self._database.read() as session:
            for master_id in await repository.count_by_master(session):
                found = await repository.find_one_of(session, master_id)
                if found is None:
                    continue
                tenant_id, wrapped = found
                await self._unwrap(scope_of_tenant(AdminPrincipal(), tenant_id), wrapped)

    async def for_writing(self, scope: TenantScope) -> bytes | None:
        """Returns the data key of a tenant, and makes it if there is none. None if encryption is off.

        Raises NotPermitted if the tenant was deleted, and Unavailable if the master keys cannot be used now.
        """
        if self._masters is None:
            return None
        if (found := await self._find(scope)) is not None:
            return found
        _, wrapped = await self._new_key(scope)
        async with self._database.write() as session:
            if await hold_tenant(session, scope) is None:
                raise _tenant_deleted()
            await repository.add(session, scope, wrapped, self._clock.now())
        made = await self._find(scope)  # another gateway may have been faster
        assert made is not None
        return made

    async def make_within(self, session: WriteSession, scope: TenantScope) -> bytes:
        """Returns the data key of a tenant that has none, which this transaction makes. Call it only with master keys.

        If the transaction is rolled back, there is no key, and nothing may stay encrypted with it.
        Raises NotPermitted if the tenant was deleted, and Unavailable if the master keys cannot be used now.
        """
        key, wrapped = await self._new_key(scope)
        if await repository.is_deleted_tenant(session, scope):
            raise _tenant_deleted()
        if await repository.add(session, scope, wrapped, self._clock.now()):
            return key
        made = await self.find_within(session, scope)  # another gateway was faster
        assert made is not None
        return made

    async def for_reading(self, scope: TenantScope) -> bytes | None:
        """Returns the data key of a tenant. None if the tenant has none. Raises Unavailable."""
        return await self._find(scope)

    async def destroy(self, scope: TenantScope) -> bool:
        """Destroys the data key of an erased tenant: nobody can read its encrypted files any more. Returns True."""
        async with self._database.write() as session:
            await repository.destroy(session, scope)
        self._known.pop(scope, None)
        for forget in self._when_destroyed:
            forget(scope)
        return True

    async def rewrap(self) -> int:
        """Wraps all data keys with the current master key. Files and rows stay as they are. Returns how many keys that were."""
        if self._masters is None:
            raise _no_masters()
        num_rewrapped = 0
        while True:
            async with self._database.read() as session:
                current_id = self._masters.current_id
                old = await repository.find_other_than(session, current_id, _REWRAPPED_PER_QUERY)
            if not old:
                return num_rewrapped
            for tenant_id, wrapped in old:
                scope = scope_of_tenant(AdminPrincipal(), tenant_id)
                key = await self._unwrap(scope, wrapped)
                anew = await asyncio.to_thread(self._masters.wrap, key, _context(scope))
                async with self._database.write() as session:
                    num_rewrapped += await repository.replace(session, scope, wrapped, anew)

    async def find_within(self, session: ReadSession, scope: TenantScope) -> bytes | None:
        """Returns the data key of a tenant as this transaction sees it. None if the tenant has none. Raises Unavailable."""
        return await self._unwrapped(scope, await repository.find(session, scope))

    async def _find(self, scope: TenantScope) -> bytes | None:
        async with self._database.read() as session:
            wrapped = await repository.find(session, scope)
        return await self._unwrapped(scope, wrapped)

    async def _new_key(self, scope: TenantScope) -> tuple[bytes, WrappedKey]:
        assert self._masters is not None, "without master keys nothing is encrypted"
        key = secrets.token_bytes(KEY_BYTES)
        with _while_serving():
            return key, await asyncio.to_thread(self._masters.wrap, key, _context(scope))

    async def _unwrapped(self, scope: TenantScope, wrapped: WrappedKey | None) -> bytes | None:
        if wrapped is None:
            self._known.pop(scope, None)
            return None
        known = self._known.get(scope)
        if known is not None and known[0] == wrapped:
            self._known.move_to_end(scope)
            return known[1]
        with _while_serving():
            key = await self._unwrap(scope, wrapped)
        self._known[scope] = wrapped, key
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        return key

    async def _unwrap(self, scope: TenantScope, wrapped: WrappedKey) -> bytes:
        if self._masters is None:
            raise _no_masters()
        return await asyncio.to_thread(self._masters.unwrap, wrapped, _context(scope))


async def open_tenant_keys(master_key_file: Path | None, database: Database, clock: Clock) -> TenantKeys:
    """Returns the data keys of all tenants, after it has checked that they can be unwrapped. Raises InvalidRequest."""
    masters = None if master_key_file is None else await asyncio.to_thread(MasterKeyFile.load, master_key_file)
    keys = TenantKeys(database, clock, masters)
    await keys.check()
    return keys


@contextmanager
def _while_serving() -> Generator[None]:
    """Makes the error of a server's setting one that a client can understand."""
    try:
        yield
    except InvalidRequest as error:
        _log.error("master_keys_unusable", extra={"reason": error.message})
        raise Unavailable(
            "Encrypted data cannot be read or written now: the operator must look at the server's master keys.",
            code="master_key_unusable",
            retry_after_s=30.0,
        ) from error


def _tenant_deleted() -> NotPermitted:
    return NotPermitted("This tenant is deleted; ask the operator.", code="tenant_deleted")


def _context(scope: TenantScope) -> bytes:
    """Binds a wrapped key to its tenant, so that a row cannot be moved to another one."""
    return b"graftwork data key\0" + scope.encode()


def _no_masters() -> InvalidRequest:
    return InvalidRequest(
        "The database has tenants' data keys, and no master keys to unwrap them: name their file in the setting "
        "master_key_file (GRAFTWORK_MASTER_KEY_FILE).",
        param="master_key_file",
        code="master_key_missing",
    )
