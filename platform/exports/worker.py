"""Makes the archives of exports on one gateway, one at a time.

    claim an export that no living gateway makes ──► write its archive ──► completed, with its digest

Owns the archive until the export has ended. All state is in the database and the folder of exports: if the gateway
dies, it or another one claims the export in a new epoch, and writes the archive anew.
Invariant: an archive has its name only when it is complete, and a row says `completed` only after that.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress

from graftwork.platform.batches.file_folder import NewContent
from graftwork.platform.batches.file_vault import finished
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, GraftworkError, Unavailable
from graftwork.platform.exports import repository
from graftwork.platform.exports.archive import ArchiveWriter
from graftwork.platform.exports.export import MAX_ATTEMPTS, Export, ExportStatus
from graftwork.platform.exports.exporter import Exporter
from graftwork.platform.exports.exports import ExportKeeper
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant

_log = logging.getLogger("graftwork.exports")

REST_S = 30.0
"""Seconds after which an export is begun again that could not go on."""
_PAGES_PER_REPORT = 20


class _ExportLost(Conflict):
    """Raised if the export was deleted, or if another gateway makes it now."""

    default_code = "export_lost"


class ExportWorker:
    """Makes the exports that this gateway claims."""

    def __init__(
        self, database: Database, exporter: Exporter, keeper: ExportKeeper, lease: GatewayLease, clock: Clock
    ) -> None:
        """`lease` is the lease of this gateway, which somebody else renews."""
        self._database = database
        self._exporter = exporter
        self._keeper = keeper
        self._lease = lease
        self._clock = clock
        self._working = asyncio.Lock()

    async def tick(self) -> None:
        """Makes all exports that no living gateway makes. Does nothing while another call works. Call it repeatedly."""
        if self._working.locked():
            return
        async with self._working:
            while (export := await self._claim()) is not None:
                await self._make(export)

    async def _claim(self) -> Export | None:
        now = self._clock.now()
        async with self._database.write() as session:
            free = await repository.find_free(session, self._lease, now - REST_S)
            return None if free is None else await repository.claim(session, self._lease, free, now)

    async def _make(self, export: Export) -> None:
        """Makes one export. If that does not work now, leaves it to any gateway, or ends it as failed."""
        try:
            if export.attempts > MAX_ATTEMPTS:
                await self._fail(export, "export_abandoned", "The gateways that made this export have stopped.")
                return
            await self._write(export)
        except _ExportLost:
            await self._keeper.vault.delete(_scope_of(export), export.content_id)
        except asyncio.CancelledError:  # the gateway ends: this try does not count
            await self._release(export, attempts=export.attempts - 1)
            raise
        except Exception as error:  # noqa: BLE001 - the outermost loop of exports: any gateway may try again
            is_known = isinstance(error, GraftworkError)
            _log.warning("export_interrupted", extra={"export_id": export.id}, exc_info=None if is_known else error)
            if export.attempts < MAX_ATTEMPTS:
                await self._release(export, attempts=export.attempts)
                return
            known = error if isinstance(error, GraftworkError) else None
            code = known.code if known else "internal_error"
            await self._fail(export, code, known.message if known else "The server's log says what went wrong.")

    async def _write(self, export: Export) -> None:
        await self._keeper.drop_archives(export, before=True)
        num_pages = 0
        async with self._new_archive(export) as archive:

            async def proceed() -> None:
                nonlocal num_pages
                num_pages += 1
                if num_pages % _PAGES_PER_REPORT == 1:
                    await self._report(export, archive)

            await self._exporter.write(_scope_of(export), archive, proceed)
            about = {
                "tenant_id": export.tenant_id,
                "export_id": export.id,
                "began_at": export.started_at,
                "ended_at": self._clock.now(),
                **self._exporter.plan.about(),
            }
            await finished(asyncio.to_thread(archive.close, about))
        await self._complete(export, archive)

    @asynccontextmanager
    async def _new_archive(self, export: Export) -> AsyncGenerator[ArchiveWriter]:
        """Opens a new archive. The end of the block completes its file; after an error nothing of it is left."""
        out = await self._keeper.vault.create(_scope_of(export), export.content_id)
        archive = ArchiveWriter(out)
        try:
            yield archive
            await finished(asyncio.to_thread(out.complete))
        except BaseException:
            await asyncio.to_thread(_give_up, archive, out)
            raise

    async def _report(self, export: Export, archive: ArchiveWriter) -> None:
        """Stores how far the archive is. Raises _ExportLost if nobody wants it any more."""
        values = {"num_rows": archive.rows, "size_bytes": archive.size_bytes}
        await self._change(export, values)

    async def _complete(self, export: Export, archive: ArchiveWriter) -> None:
        now = self._clock.now()
        ended = {
            "status": ExportStatus.COMPLETED,
            "ended_at": now,
            "expires_at": now + self._keeper.lives_s,
            "gateway": None,
        }
        written = {"num_rows": archive.rows, "size_bytes": archive.size_bytes, "sha256": archive.sha256}
        await self._change(export, ended | written)

    async def _change(self, export: Export, values: Mapping[str, object]) -> None:
        async with self._database.write() as session:
            if not await repository.change(session, export, values):
                raise _ExportLost("This export was deleted, or another gateway makes it now.")

    async def _fail(self, export: Export, code: str, reason: str) -> None:
        now = self._clock.now()
        message = f"{reason} It was begun {min(export.attempts, MAX_ATTEMPTS)} times; create a new export."
        values = {
            "status": ExportStatus.FAILED,
            "ended_at": now,
            "expires_at": now + self._keeper.lives_s,
            "gateway": None,
            "error_code": code[:64],
            "error_message": message[:1000],
        }
        with suppress(_ExportLost):
            await self._change(export, values)

    async def _release(self, export: Export, attempts: int) -> None:
        """Lets any gateway begin the export again."""
        values = {"status": ExportStatus.QUEUED, "gateway": None, "attempts": attempts}
        with suppress(Unavailable, _ExportLost):  # Unavailable: then the claim ends with this gateway's lease
            await self._change(export, values)


def _give_up(archive: ArchiveWriter, out: NewContent) -> None:
    archive.abandon()
    out.discard()


def _scope_of(export: Export) -> TenantScope:
    return scope_of_tenant(AdminPrincipal(), export.tenant_id)
