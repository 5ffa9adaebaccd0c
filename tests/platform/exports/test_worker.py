"""Tests of making exports: crashes, several gateways, and what memory they need."""

import asyncio
import io
import tracemalloc
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from graftwork.platform.batches.file_folder import FileFolder, NewContent
from graftwork.platform.batches.file_vault import FileVault
from graftwork.platform.batches.files import FileKeeper, FileLimits, NewFile
from graftwork.platform.batches.stored_file import FilePurpose
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.errors import Conflict, Unavailable
from graftwork.platform.exports import repository
from graftwork.platform.exports.export import MAX_ATTEMPTS, Export, ExportStatus
from graftwork.platform.exports.exporter import Content, ContentsOf, Exporter, Plan
from graftwork.platform.exports.exports import ExportKeeper
from graftwork.platform.exports.platform_sections import FILES, PLATFORM_SECTIONS
from graftwork.platform.exports.worker import REST_S, ExportWorker
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.tenancy import Tenancy

DAY_S = 86_400.0


class Gateways:
    """Gateways on one database, with one data folder, each of which makes exports when it is told to."""

    def __init__(self, database: Database, folder: Path, clock: ManualClock) -> None:
        self.database = database
        self.clock = clock
        self.files = FileKeeper(database, self._vault(folder / "files"), clock, FileLimits(2**40, DAY_S))
        self.exports = ExportKeeper(database, self._vault(folder / "exports"), clock, DAY_S)
        self.opened = asyncio.Event()
        self.may_open = asyncio.Event()
        self.folder = folder / "exports"

    def _vault(self, folder: Path) -> FileVault:
        return FileVault(FileFolder(folder), TenantKeys(self.database, self.clock, None))

    async def tenant(self) -> TenantScope:
        tenant = await Tenancy(self.database, b"pepper", self.clock).create_tenant("acme")
        return scope_of_tenant(AdminPrincipal(), tenant.id)

    async def upload(self, scope: TenantScope, pieces: list[bytes]) -> None:
        def write(out: NewContent) -> None:
            for piece in pieces:
                out.write(piece)

        size = sum(len(piece) for piece in pieces)
        await self.files.upload(scope, NewFile(FilePurpose.BATCH, "file"), size, write)

    def worker(self, lease: GatewayLease, *, fails: bool = False) -> ExportWorker:
        def contents(row: object) -> list[Content]:
            assert isinstance(row, dict)
            if fails:
                raise Unavailable("The disk is away.")
            return [Content(f"files/{row['id']}", lambda: self.files.vault.open(row["tenant_id"], row["id"]))]

        plan = Plan(PLATFORM_SECTIONS, (ContentsOf(FILES, contents),), {})
        return ExportWorker(self.database, Exporter(self.database, plan), self.exports, lease, self.clock)

    @asynccontextmanager
    async def alive(self) -> AsyncGenerator[GatewayLease]:
        """A gateway that lives until the end of the block."""
        lease = GatewayLease(lease_s=3600.0)
        async with self.database.write() as session:
            await lease.renew(session)
        try:
            yield lease
        finally:
            await lease.end(self.database)

    async def only(self, scope: TenantScope, export: Export) -> Export:
        """Returns the present state of an export."""
        return await self.exports.get(scope, export.id)

    def archive_files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture
def gateways(database: Database, tmp_path: Path, manual_clock: ManualClock) -> Gateways:
    return Gateways(database, tmp_path, manual_clock)


async def until(is_so: Callable[[], object]) -> None:
    """Lets the event loop run until something is so."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0)


async def claimed_by_a_gateway_that_dies(gateways: Gateways) -> None:
    """Lets a gateway claim the export and begin its archive, and then be gone without a word."""
    async with gateways.alive() as lease:
        with pytest.raises(Dead):
            await begin_and_die(gateways, lease)


class Dead(BaseException):
    """The end of a process, in which nothing is cleaned up."""


async def begin_and_die(gateways: Gateways, lease: GatewayLease) -> None:
    """Ends as a process does that dies in the middle of an archive."""
    now = gateways.clock.now()
    async with gateways.database.write() as session:
        free = await repository.find_free(session, lease, now - REST_S)
        assert free is not None
        export = await repository.claim(session, lease, free, now)
    assert export is not None
    folder = gateways.folder / export.tenant_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{export.content_id}.new").write_bytes(b"PK half of an archive")
    raise Dead


async def test_another_gateway_begins_again_after_a_crash(gateways: Gateways) -> None:
    """If a gateway dies in the middle of an archive, the next one makes it from the beginning, and nothing else is left."""
    scope = await gateways.tenant()
    await gateways.upload(scope, [b"content"])
    export = await gateways.exports.create(scope, "admin")
    await claimed_by_a_gateway_that_dies(gateways)
    half = gateways.archive_files()

    gateways.clock.advance(REST_S + 1)
    async with gateways.alive() as lease:
        await gateways.worker(lease).tick()
    done = await gateways.only(scope, export)
    _, file = await gateways.exports.open(scope, export.id, "admin")

    with file:
        archive = zipfile.ZipFile(io.BytesIO(file.read()))
    assert archive.testzip() is None
    assert (done.status, done.attempts, done.epoch) == (ExportStatus.COMPLETED, 2, 2)
    assert len(half) == 1
    assert len(gateways.archive_files()) == 1
    assert gateways.archive_files() != half


async def test_a_living_gateway_keeps_its_export(gateways: Gateways) -> None:
    """While the gateway that makes an export lives, no other gateway begins it, and no second export can be created."""
    scope = await gateways.tenant()
    export = await gateways.exports.create(scope, "admin")
    async with gateways.alive() as first, gateways.alive() as second:
        with pytest.raises(Dead):
            await begin_and_die(gateways, first)

        gateways.clock.advance(REST_S + 1)
        await gateways.worker(second).tick()
        with pytest.raises(Conflict, match="being made"):
            await gateways.exports.create(scope, "admin")
        found = await gateways.only(scope, export)

    assert (found.status, found.epoch) == (ExportStatus.RUNNING, 1)


async def test_a_gateway_goes_on_with_what_it_could_not_give_back(gateways: Gateways) -> None:
    """An export that its gateway neither ended nor gave back, because the database was away, is begun again by itself."""
    scope = await gateways.tenant()
    export = await gateways.exports.create(scope, "admin")
    async with gateways.alive() as lease:
        with pytest.raises(Dead):
            await begin_and_die(gateways, lease)

        gateways.clock.advance(REST_S + 1)
        await gateways.worker(lease).tick()

    assert (await gateways.only(scope, export)).status is ExportStatus.COMPLETED


async def test_an_export_that_kills_gateways_fails(gateways: Gateways) -> None:
    """After three gateways have died over an export it is failed, says so, and another one can be created."""
    scope = await gateways.tenant()
    export = await gateways.exports.create(scope, "admin")
    for _ in range(MAX_ATTEMPTS):
        await claimed_by_a_gateway_that_dies(gateways)
        gateways.clock.advance(REST_S + 1)
    async with gateways.alive() as lease:
        await gateways.worker(lease).tick()
    found = await gateways.only(scope, export)

    assert found.status is ExportStatus.FAILED
    assert found.failure is not None
    assert (found.failure.code, "3 times" in found.failure.message) == ("export_abandoned", True)
    await gateways.exports.create(scope, "admin")


async def test_an_export_that_cannot_go_on_rests_and_then_fails(gateways: Gateways) -> None:
    """An error of the storage is tried again after a rest, three times in all; the third time its message is the reason."""
    scope = await gateways.tenant()
    await gateways.upload(scope, [b"content"])
    export = await gateways.exports.create(scope, "admin")
    states = []
    async with gateways.alive() as lease:
        worker = gateways.worker(lease, fails=True)
        for _ in range(MAX_ATTEMPTS):
            await worker.tick()
            await worker.tick()  # too early: it rests
            states.append((await gateways.only(scope, export)).epoch)
            gateways.clock.advance(REST_S + 1)
    found = await gateways.only(scope, export)

    assert states == [1, 2, 3]
    assert found.failure is not None
    assert found.failure.message.startswith("The disk is away.")
    assert gateways.archive_files() == []


async def test_a_gateway_that_ends_gives_its_export_back(gateways: Gateways) -> None:
    """A gateway that is stopped leaves no half archive, and its try does not count."""
    scope = await gateways.tenant()
    await gateways.upload(scope, [b"x" * 2**20] * 8)
    export = await gateways.exports.create(scope, "admin")
    async with gateways.alive() as lease:
        working = asyncio.create_task(gateways.worker(lease).tick())
        await until(gateways.archive_files)
        working.cancel()
        await asyncio.wait([working])
        given_back = await gateways.only(scope, export)
        left = gateways.archive_files()
        await gateways.worker(lease).tick()

    assert (given_back.status, given_back.attempts, left) == (ExportStatus.QUEUED, 0, [])
    assert (await gateways.only(scope, export)).status is ExportStatus.COMPLETED


async def test_an_export_that_is_deleted_while_it_is_made_leaves_nothing(gateways: Gateways) -> None:
    """The gateway that makes an export notices that it was deleted, and deletes what it has written."""
    scope = await gateways.tenant()
    await gateways.upload(scope, [b"x" * 2**20] * 8)
    export = await gateways.exports.create(scope, "admin")
    async with gateways.alive() as lease:
        working = asyncio.create_task(gateways.worker(lease).tick())
        await until(gateways.archive_files)
        await gateways.exports.delete(scope, export.id, "admin")
        await working

    assert gateways.archive_files() == []


async def test_memory_does_not_grow_with_the_export(gateways: Gateways) -> None:
    """An export of 32 MiB of content needs a few MiB of memory."""
    scope = await gateways.tenant()
    piece = bytes(range(256)) * 4096
    await gateways.upload(scope, [piece] * 32)
    export = await gateways.exports.create(scope, "admin")
    async with gateways.alive() as lease:
        worker = gateways.worker(lease)
        tracemalloc.start()
        try:
            await worker.tick()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert (await gateways.only(scope, export)).status is ExportStatus.COMPLETED
    assert peak < 12 * 2**20
