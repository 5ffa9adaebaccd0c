"""Exports the usage of single requests from the database to a file, page by page.

Owns the order: tenant by tenant, each by time. Never changes a row.
"""

from collections.abc import AsyncGenerator, Callable
from typing import IO

from graftwork.platform.database import Database
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.upkeep.export_files import ExportForm, RowWriter, open_writer
from graftwork.platform.ledger.upkeep.export_rows import Key, next_tenant, read_page

PAGE = 10_000


async def export_usage(
    database: Database,
    file: IO[bytes],
    form: ExportForm,
    span: tuple[float, float],
    tenant_id: TenantId | None = None,
    on_rows: Callable[[str], None] = lambda state: None,
) -> int:
    """Writes all requests of the time `span` [start, end) in Unix seconds, of one tenant or of all. Returns their number.

    Calls `on_rows` with a text that says how many are written, after each page. Rows that are recorded meanwhile may be missing. Raises
    InvalidRequest if the form needs a package that is not installed, and Unavailable if the database does not answer.
    """
    writer, total = open_writer(form, file), 0
    tenant = tenant_id or await _next(database, "")
    while tenant is not None:
        async for count in _tenant_pages(database, writer, tenant, span):
            total += count
            on_rows(f"{total} requests")
        tenant = None if tenant_id is not None else await _next(database, tenant)
    writer.close()
    return total


async def _tenant_pages(
    database: Database, writer: RowWriter, tenant_id: TenantId, span: tuple[float, float]
) -> AsyncGenerator[int, None]:
    """Writes all pages of a tenant, and yields the number of rows of each."""
    after: Key | None = None
    while True:
        async with database.read() as session:
            rows = await read_page(session, tenant_id, *span, after, PAGE)
        if not rows:
            return
        writer.write(rows)
        yield len(rows)
        after = rows[-1]["at"], rows[-1]["request_id"]


async def _next(database: Database, after: str) -> TenantId | None:
    async with database.read() as session:
        return await next_tenant(session, after)
