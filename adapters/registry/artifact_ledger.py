"""Keeps the stored files of an adapter as long as a version needs them, even if uploads and deletes run at the same
time.

The two files of an adapter are called an artifact. The digest of the adapter identifies the artifact.

    keep     insert and lock the digest's row → write files → (the caller records its version)
    free     [lock the row → check that no version of any tenant has the digest → remove files → delete the row]
             in one transaction

Owns the table of the digests whose files are stored. Never decides which versions exist: the registry does.
Invariant: every stored file has a row in this table. The row is written before the files and deleted after them, and
files are removed only under the lock of the row. A crash between two steps leaves at most a row (and files) that no
version needs, which `sweep` removes.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from graftwork.adapters.inspection.upload import Upload
from graftwork.adapters.registry.artifact_rows import ArtifactLedger, is_referenced, unreferenced_digests
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Unavailable


class ArtifactKeeper:
    """Writes and removes the stored files of adapters, and lists the digests of these adapters in a table."""

    def __init__(
        self,
        database: Database,
        artifacts: ArtifactStore,
        clock: Clock,
        before_free: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self._clock = clock
        self._before_free = before_free

    @asynccontextmanager
    async def keeping(self, upload: Upload) -> AsyncGenerator[None]:
        """Stores the upload's files, then runs the `async with` block, which records a version.

        If the block fails, removes the files again, unless another version has the same digest.
        """
        kept = False
        try:
            await self.store(upload)
            yield
            kept = True
        finally:
            if not kept:
                await self.free((upload.digest,))

    async def store(self, upload: Upload) -> None:
        """Adds the digest of the upload to the table of stored files, then writes the files.

        Does not change files that are stored already.
        """
        async with self._database.write() as session:
            await ArtifactLedger(session).claim(upload.digest, self._clock.now())
        await self._put(upload)

    async def claim(self, session: WriteSession, upload: Upload) -> None:
        """Locks the digest of the upload in the table of stored files until the transaction of `session` ends.

        While it is locked, nobody removes the files. The caller records a version with this digest in the same
        transaction. If a delete has removed the files before the lock, writes them again.
        """
        await ArtifactLedger(session).claim(upload.digest, self._clock.now())
        if not await asyncio.to_thread(self._artifacts.exists, upload.digest):
            await self._put(upload)  # a delete by another tenant removed it after it was written

    async def free(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Removes the stored files of these digests. Files stay if an adapter version (of any tenant) still needs them.

        Returns the digests whose files were removed.
        """
        return tuple([digest for digest in sorted(digests) if await self._free_one(digest)])

    async def sweep(self) -> tuple[str, ...]:
        """Removes all stored files that no version of any tenant needs, such as files left by a crash. Returns their
        digests.

        Safe at any time, because an upload writes its files again if they were removed while it runs.
        """
        async with self._database.read() as session:
            digests = await unreferenced_digests(session)
        return await self.free(digests)

    async def _put(self, upload: Upload) -> None:
        """Writes the files.

        A caller that is cancelled still waits until they are written, so that every file has a row.
        """
        writing = asyncio.ensure_future(asyncio.to_thread(self._artifacts.put, upload.digest, upload.files))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    async def _free_one(self, digest: str) -> bool:
        async with self._database.read() as session:
            if await is_referenced(session, digest):
                return False
        if self._before_free is not None and await asyncio.to_thread(self._artifacts.exists, digest):
            with suppress(Unavailable):  # an engine that does not answer holds nothing
                await self._before_free(digest)
        async with self._database.write() as session:
            ledger = ArtifactLedger(session)
            if not await ledger.lock_unreferenced(digest):
                return False
            await asyncio.to_thread(self._artifacts.delete, digest)
            await ledger.forget(digest)
        return True
