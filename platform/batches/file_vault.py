"""Opens tenants' files for the event loop, encrypted with the tenant's data key if encryption is on.

    create ──► the tenant's data key ──► FileFolder, on another thread ──► a file, encrypted or not
    open   ──► whichever of the two there is

Owns which key belongs to which file. Never knows which files there should be: FileKeeper and ExportKeeper do.
Files from before encryption was switched on stay as they are, and are read as they are.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, BinaryIO

from graftwork.platform.batches.file_folder import FileFolder, NewContent
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import TenantScope


class FileVault:
    """The files of all tenants in one folder."""

    def __init__(self, folder: FileFolder, keys: TenantKeys) -> None:
        self._folder = folder
        self._keys = keys

    async def create(self, scope: TenantScope, file_id: str) -> NewContent:
        """Opens a new file for writing. The caller ends it with `complete` or `discard`, also if it is cancelled."""
        key = await self._keys.for_writing(scope)
        made = list[NewContent]()
        try:
            await finished(asyncio.to_thread(lambda: made.append(self._folder.create(TenantId(scope), file_id, key))))
        except asyncio.CancelledError:
            for content in made:
                await asyncio.to_thread(content.discard)
            raise
        return made[0]

    async def open(self, scope: TenantScope, file_id: str) -> BinaryIO:
        """Opens a complete file for reading, from front to back. Raises NotFound if it is not in this folder."""
        key = await self._keys.for_reading(scope)
        return await asyncio.to_thread(self._folder.open, TenantId(scope), file_id, key)

    async def delete(self, scope: TenantScope, file_id: str) -> None:
        """Deletes a file, also one that is only half written. Who has opened it before can still read it."""
        await asyncio.to_thread(self._folder.delete, TenantId(scope), file_id)

    async def delete_tenant(self, scope: TenantScope) -> None:
        """Deletes all files of a tenant, also those that a crash has left."""
        await asyncio.to_thread(self._folder.delete_tenant, TenantId(scope))


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """Waits for work on another thread until it has ended, also if the caller is cancelled meanwhile."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
