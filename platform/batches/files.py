"""Keeps tenants' files: the row of each in the database, and its content in the folder of files.

    store    insert the row, not ready ──► write the content ──► make the row ready
    delete   hide the row ──► delete the content ──► delete the row

Owns these orders, and the limits of bytes. Never reads what a file says.
Invariant: each content has a row. A crash between two steps leaves a row that is not ready, which `sweep` removes with
what there is of its content.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

from graftwork.platform.batches import file_rows
from graftwork.platform.batches.file_folder import NewContent, pieces_of
from graftwork.platform.batches.file_vault import FileVault, finished
from graftwork.platform.batches.stored_file import FILE_PREFIX, SHOWN_PURPOSES, FilePurpose, StoredFile, unknown_file
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import BudgetSpent, Conflict, NotPermitted
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.quota_rows import find_quota
from graftwork.platform.tenancy.repository import hold_tenant

_UNREADY_S = 24 * 3600.0
"""Seconds after which a file that never became ready counts as left by a crash. No upload and no batch takes as long."""
_SWEPT_PER_QUERY = 100
_MAX_FILENAME = 255

Write = Callable[[NewContent], None]
"""A function that writes the content of a file. It runs on another thread."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How large files may be, and how long they are kept."""

    max_tenant_bytes: int
    """The most bytes of all files of a tenant whose quota says nothing else."""
    retention_s: float
    """The most seconds that a file is kept."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be stored."""

    purpose: FilePurpose
    filename: str
    lives_s: float | None = None
    """The seconds after which the file expires, at most those of the server's own; None means these."""


class FileKeeper:
    """Stores, finds and deletes the files of tenants."""

    def __init__(self, database: Database, vault: FileVault, clock: Clock, limits: FileLimits) -> None:
        self._database = database
        self._clock = clock
        self.vault = vault
        self.limits = limits

    async def upload(self, scope: TenantScope, new: NewFile, size_bytes: int, write: Write) -> StoredFile:
        """Stores a file of `size_bytes` bytes that a client sends.

        Raises BudgetSpent if the tenant would then have more bytes than it may, and NotPermitted if it was deleted
        meanwhile.
        """
        async with self._database.write() as session:
            if await hold_tenant(session, scope) is None:
                raise _tenant_gone()
            await self._check_bytes(session, scope, size_bytes)
            file = self._begun(scope, new, size_bytes)
            await file_rows.add(session, file)
        async with self._written(scope, file, write), self._database.write() as session:
            if not await file_rows.make_ready(session, scope, file.id, size_bytes):
                raise _tenant_gone()
        return replace(file, is_ready=True)

    async def begin(self, session: WriteSession, scope: TenantScope, new: NewFile) -> StoredFile:
        """Adds the row of a file that the server itself writes, in the caller's transaction. It counts in the tenant's
        bytes, but is stored in any case.
        """
        file = self._begun(scope, new, 0)
        await file_rows.add(session, file)
        return file

    async def get(self, scope: TenantScope, file_id: str, param: str | None = None) -> StoredFile:
        """Returns a file that clients see. Raises NotFound, with the field `param`."""
        async with self._database.read() as session:
            file = await file_rows.find(session, scope, file_id)
        if file is None or file.purpose not in SHOWN_PURPOSES or file.expires_at <= self._clock.now():
            raise unknown_file(file_id, param)
        return file

    async def list(self, scope: TenantScope, page: PageRequest, purpose: FilePurpose | None) -> Page[StoredFile]:
        wanted = SHOWN_PURPOSES if purpose is None else tuple(one for one in SHOWN_PURPOSES if one is purpose)
        async with self._database.read() as session:
            return await file_rows.page(session, scope, wanted, self._clock.now(), page)

    async def delete(self, scope: TenantScope, file_id: str) -> None:
        """Deletes a file that clients see. Raises NotFound, and Conflict while a batch reads the file."""
        await self.get(scope, file_id)
        async with self._database.write() as session:
            await hold_tenant(session, scope)  # so that no batch begins to read it meanwhile
            if (user := await file_rows.user_of(session, scope, file_id)) is not None:
                raise Conflict(f"The batch {user} reads this file: cancel the batch, or wait for its end.")
            await file_rows.hide(session, scope, file_id)
        await self.remove(scope, file_id)

    async def remove(self, scope: TenantScope, file_id: str) -> None:
        """Deletes the content of a file that nobody finds any more, and then its row."""
        await self.vault.delete(scope, file_id)
        async with self._database.write() as session:
            await file_rows.forget(session, scope, file_id)

    async def open(self, scope: TenantScope, file_id: str) -> BinaryIO:
        """Opens the content of a file. Raises NotFound if it is not in this server's folder."""
        return await self.vault.open(scope, file_id)

    async def sweep(self) -> int:
        """Removes the files of all tenants that have expired, and what a crash has left. Returns how many there were."""
        num_removed = 0
        while True:
            now = self._clock.now()
            async with self._database.read() as session:
                lapsed = await file_rows.find_lapsed(session, now, now - _UNREADY_S, _SWEPT_PER_QUERY)
            for tenant_id, file_id in lapsed:
                await self.remove(_scope(tenant_id), file_id)
            num_removed += len(lapsed)
            if len(lapsed) < _SWEPT_PER_QUERY:
                return num_removed

    async def delete_older(self, scope: TenantScope, before: float) -> int:
        """Deletes a tenant's files from before a time in Unix seconds. Returns how many. Files that a batch reads stay."""
        num_deleted = 0
        while True:
            async with self._database.read() as session:
                old = await file_rows.find_older(session, scope, before, _SWEPT_PER_QUERY)
            for file_id in old:
                await self.remove(scope, file_id)
            num_deleted += len(old)
            if len(old) < _SWEPT_PER_QUERY:
                return num_deleted

    async def erase(self, scope: TenantScope) -> bool:
        """Erases all files of a deleted tenant. Call it after its batches were erased. Returns True."""
        async with self._database.write() as session:
            await file_rows.forget_all(session, scope)
        await self.vault.delete_tenant(scope)
        return True

    def _begun(self, scope: TenantScope, new: NewFile, size_bytes: int) -> StoredFile:
        now, most_s = self._clock.now(), self.limits.retention_s
        lives_s = most_s if new.lives_s is None else min(new.lives_s, most_s)
        filename = new.filename[-_MAX_FILENAME:]
        return StoredFile(
            new_id(FILE_PREFIX), TenantId(scope), new.purpose, filename, size_bytes, now, now + lives_s, is_ready=False
        )

    async def _check_bytes(self, session: WriteSession, scope: TenantScope, size_bytes: int) -> None:
        own = (await find_quota(session, TenantId(scope))).max_file_bytes
        most = self.limits.max_tenant_bytes if own is None else own
        after = await file_rows.sum_bytes(session, scope) + size_bytes
        if after > most:
            raise BudgetSpent(
                f"With these {size_bytes} bytes your files would have {after} bytes, above your limit max_file_bytes of "
                f"{most}: delete files, or ask for more.",
                param="file",
                code="max_file_bytes_exceeded",
                details={"limit": "max_file_bytes"},
            )

    @asynccontextmanager
    async def _written(self, scope: TenantScope, file: StoredFile, write: Write) -> AsyncGenerator[None]:
        """Writes the content, and runs the block, which makes the row ready. After a failure, removes both."""
        try:
            out = await self.vault.create(scope, file.id)
            await finished(asyncio.to_thread(_fill, out, write))
            yield
        except BaseException:
            await self.remove(scope, file.id)
            raise


def _fill(out: NewContent, write: Write) -> None:
    try:
        write(out)
        out.complete()
    except BaseException:
        out.discard()
        raise


def copy_from(source: BinaryIO) -> Write:
    """Returns a function that writes what `source` has, from its beginning."""

    def write(out: NewContent) -> None:
        source.seek(0)
        for piece in pieces_of(source):
            out.write(piece)

    return write


def _scope(tenant_id: TenantId) -> TenantScope:
    return scope_of_tenant(AdminPrincipal(), tenant_id)


def _tenant_gone() -> NotPermitted:
    return NotPermitted("This tenant is deleted; ask the operator.", code="tenant_deleted")
