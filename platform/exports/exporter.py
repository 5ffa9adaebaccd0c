"""Collects everything that a tenant has into an archive, a page of rows at a time.

    each section: its rows ──► a table        each row with contents: its files ──► files        ──► the manifest

Owns the order, and what memory holds: one page of rows, or one piece of a file. Never decides which tables there are:
the caller passes the sections. The rows are read page by page, so what changes meanwhile may be in the archive as it was
before or after the change. Each page is read in a transaction of its own, so a long export holds nothing up.
Invariant: a row whose contents are missing makes the export fail, unless the row was deleted meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, BinaryIO

from graftwork.platform.batches.file_vault import finished
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound, Unavailable
from graftwork.platform.exports import repository
from graftwork.platform.exports.archive import ArchiveWriter
from graftwork.platform.exports.sections import Row, Section
from graftwork.platform.tenancy.principals import TenantScope

_ROWS_PER_PAGE = 100


@dataclass(frozen=True, slots=True)
class Content:
    """A file that belongs to a row."""

    name: str
    """Its name in the archive. A name that is there already is not added again."""
    open: Callable[[], Awaitable[BinaryIO]]
    """Opens the file. Raises NotFound if there is none."""
    compress: bool = True


@dataclass(frozen=True, slots=True)
class ContentsOf:
    """The files of the rows of one section."""

    section: Section
    contents: Callable[[Row], Iterable[Content]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an export contains."""

    sections: tuple[Section, ...]
    contents: tuple[ContentsOf, ...]
    left_out: Mapping[str, str]
    """The tables of which an export has nothing, with the reason for each."""

    def about(self) -> dict[str, Any]:
        """Returns what the manifest says of what is left out."""
        withheld = {
            f"tables/{section.file}: {column}": reason
            for section in self.sections
            for column, reason in section.withheld.items()
        }
        return {"withheld": withheld, "left_out": dict(self.left_out)}


class Exporter:
    """Writes the archives of all tenants' exports."""

    def __init__(self, database: Database, plan: Plan) -> None:
        self._database = database
        self.plan = plan

    async def write(self, scope: TenantScope, archive: ArchiveWriter, proceed: Callable[[], Awaitable[None]]) -> None:
        """Writes all but the manifest. Calls `proceed` after each page and each file; it may raise to stop the work.

        Raises Unavailable if a file is missing that should be there.
        """
        for section in self.plan.sections:
            await _on_thread(archive.begin_table, section.file)
            async with aclosing(self._pages(scope, section, None)) as pages:
                async for page in pages:
                    await _on_thread(archive.add_rows, [section.shown(row) for row in page])
                    await proceed()
            await _on_thread(archive.end)
        names = set[str]()
        for one in self.plan.contents:
            async with aclosing(self._pages(scope, one.section, None)) as pages:
                async for page in pages:
                    for row in page:
                        await self._add_contents(scope, archive, one, row, names)
                        await proceed()

    async def _add_contents(
        self, scope: TenantScope, archive: ArchiveWriter, one: ContentsOf, row: Row, names: set[str]
    ) -> None:
        for content in one.contents(row):
            if content.name in names:
                continue
            try:
                source = await content.open()
            except NotFound as error:
                async with self._database.read() as session:
                    if not await repository.has_row(session, one.section, scope, one.section.key_of(row)):
                        return  # it was deleted while the export ran
                raise Unavailable(
                    f"The file {content.name} is not on this gateway: its disk has lost it, or it is on another one's. "
                    "Restore it or delete it, or let gateways share their data folder, and create the export again.",
                    code="export_file_missing",
                ) from error
            with source:
                await finished(asyncio.to_thread(archive.add_file, content.name, source, compress=content.compress))
            names.add(content.name)

    async def _pages(
        self, scope: TenantScope, section: Section, parents: Sequence[str] | None
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yields the tenant's rows of a section, page by page."""
        if section.parent is not None and parents is None:
            async with aclosing(self._pages(scope, section.parent, None)) as above:
                async for page in above:
                    keys = [str(section.parent.key_of(row)[0]) for row in page]
                    async with aclosing(self._pages(scope, section, keys)) as pages:
                        async for found in pages:
                            yield found
            return
        after: tuple[Any, ...] | None = None
        while True:
            async with self._database.read() as session:
                rows = await repository.rows_after(session, section, scope, parents, after, _ROWS_PER_PAGE)
            if rows:
                after = section.key_of(rows[-1])
                yield rows
            if len(rows) < _ROWS_PER_PAGE:
                return


async def _on_thread(work: Callable[..., None], *arguments: object) -> None:
    """Runs work that belongs to one archive on another thread, and waits for its end even if the caller is cancelled."""
    await finished(asyncio.to_thread(work, *arguments))
