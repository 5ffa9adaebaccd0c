"""Keeps an artifact (an adapter's files) as long as a version needs it, also while uploads and deletes run at once.

    keep     claim digest → write files → (the caller records its version)
    free     [lock digest → no version of any tenant refers to it → remove files → forget digest]    one transaction

Owns the table of digests next to the artifact store. Never decides which versions exist: the registry does.
Invariant: every file has a row. A row is written before its files and deleted after them, and files are removed only
under the row's lock. A crash between two steps leaves at most an unused row, which `sweep` finds.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from graftwork.adapters.inspection.upload import Upload
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.repository import ArtifactLedger, is_referenced, unreferenced_digests
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Unavailable


class ArtifactKeeper:
    """The artifact store, together with its table of digests."""

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
        """Stores the upload's files, then runs the block.

        If the block fails, removes the files unless another version needs them.
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
        """Writes the upload's files, and records their digest. Does nothing to files that are stored already."""
        async with self._database.write() as session:
            await ArtifactLedger(session).claim(upload.digest, self._clock.now())
        await self._put(upload)

    async def claim(self, session: WriteSession, upload: Upload) -> None:
        """Locks the digest until the end of the transaction, which records a version with this digest.

        Writes the files again if another tenant's delete has removed them meanwhile.
        """
        await ArtifactLedger(session).claim(upload.digest, self._clock.now())
        if not await asyncio.to_thread(self._artifacts.exists, upload.digest):
            await self._put(upload)  # a delete by another tenant removed it after it was written

    async def free(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Removes those of the artifacts that no version refers to. Returns the digests of the removed artifacts."""
        return tuple([digest for digest in sorted(digests) if await self._free_one(digest)])

    async def sweep(self) -> tuple[str, ...]:
        """Removes the artifacts that a crash has left without a version, and returns their digests.

        May be called at any time, because a running upload writes its files again.
        """
        async with self._database.read() as session:
            digests = await unreferenced_digests(session)
        return await self.free(digests)

    async def _put(self, upload: Upload) -> None:
        """Writes the files.

        A caller that is cancelled still waits until they are written, so that every file has a row.
        """
        writing = asyncio.ensure_future(
            asyncio.to_thread(self._artifacts.put, upload.digest, upload.config, upload.weights)
        )
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
