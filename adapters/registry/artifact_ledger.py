"""Artifacts for as long as somebody needs them, whoever uploads or deletes at the same time.

Owns the ledger of digests beside the artifact store: a row is there before its files and goes after them, and files
are removed only under the row's lock. So every file has a row, and a crash between two steps leaves at worst a row
that nobody refers to, which `sweep` finds.

    keep     claim digest → write files → (the caller records its version)
    free     [lock digest → no version of any tenant refers to it → remove files → forget digest]    one transaction
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from graftwork.adapters.inspection.upload import Upload
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.repository import ArtifactLedger, is_referenced, unreferenced_digests
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import CapacityAbsent


class ArtifactKeeper:
    """The artifact store and its ledger."""

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
        """The upload's files are stored inside the block, and removed if it fails and nobody else needs them."""
        kept = False
        try:
            await self.store(upload)
            yield
            kept = True
        finally:
            if not kept:
                await self.free((upload.digest,))

    async def store(self, upload: Upload) -> None:
        """Write the files, or write them again where another's delete has freed them since."""
        async with self._database.write() as session:
            await ArtifactLedger(session).claim(upload.digest, self._clock.now())
        await self._put(upload)

    async def claim(self, session: WriteSession, upload: Upload) -> None:
        """Hold the digest until the end of the transaction that records a version of it."""
        await ArtifactLedger(session).claim(upload.digest, self._clock.now())
        if not await asyncio.to_thread(self._artifacts.exists, upload.digest):
            await self._put(upload)  # another's delete has freed it since it was written

    async def free(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Remove the files that no version refers to; the digests they had."""
        return tuple([digest for digest in sorted(digests) if await self._free_one(digest)])

    async def sweep(self) -> tuple[str, ...]:
        """Free what a crash left behind. Safe at any time: an upload under way writes its files again."""
        async with self._database.read() as session:
            digests = await unreferenced_digests(session)
        return await self.free(digests)

    async def _put(self, upload: Upload) -> None:
        """Write the files; a caller that is cancelled meanwhile waits for the end, or they would outlive their row."""
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
            with suppress(CapacityAbsent):  # an engine that is gone holds nothing
                await self._before_free(digest)
        async with self._database.write() as session:
            ledger = ArtifactLedger(session)
            if not await ledger.lock_unreferenced(digest):
                return False
            await asyncio.to_thread(self._artifacts.delete, digest)
            await ledger.forget(digest)
        return True
