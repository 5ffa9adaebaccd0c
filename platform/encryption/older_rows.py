"""Encrypts the content of rows that are older than encryption, while gateways work.

    each table with content ──► rows with a plain value, a page at a time ──► encrypted, in one transaction a page

Owns the order. Never changes a value that is encrypted, so it may be stopped at any time and run again: the rows say
themselves what is left. Leaves the rows of deleted tenants alone, which are erased, and the answers of operators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftwork.platform.contents.columns import content_columns, is_sealed, key_columns
from graftwork.platform.contents.rows import row_sealer
from graftwork.platform.database import Base, Database, WriteSession
from graftwork.platform.encryption import repository
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import TenantId

_ROWS_PER_TRANSACTION = 50


@dataclass(frozen=True, slots=True)
class EncryptedTable:
    """What was done in one table."""

    name: str
    encrypted: int
    left: int
    """The rows that stay plain: those of deleted tenants and of operators."""


def tables_with_content() -> list[type[Base]]:
    """Returns all tables that have columns of content. The caller has imported the modules that define tables."""
    tables: list[type[Base]] = [mapper.class_ for mapper in Base.registry.mappers]
    return sorted(filter(content_columns, tables), key=lambda table: str(table.__tablename__))


async def encrypt_older_rows(
    database: Database, tables: Sequence[type[Base]], show: Callable[[str, int, int], None]
) -> list[EncryptedTable]:
    """Encrypts all plain content in `tables`. `database` must encrypt rows, see `encrypt_rows`.

    Calls `show` with a table's name, how many of its rows are done, and how many there were, after each page.
    Raises Unavailable if the database does not answer; what is done stays done.
    """
    return [await _encrypt_table(database, table, show) for table in tables]


async def _encrypt_table(
    database: Database, table: type[Base], show: Callable[[str, int, int], None]
) -> EncryptedTable:
    async with database.read() as session:
        total = await repository.count_plain(session, table)
    num_encrypted, num_left, after = 0, 0, None
    while True:
        show(table.__tablename__, num_encrypted + num_left, total)
        async with database.write() as session:
            rows = await repository.find_plain(session, table, after, _ROWS_PER_TRANSACTION)
            num_done = sum([await _encrypt_row(session, table, row) for row in rows])
        num_encrypted, num_left = num_encrypted + num_done, num_left + len(rows) - num_done
        if len(rows) < _ROWS_PER_TRANSACTION:
            return EncryptedTable(table.__tablename__, num_encrypted, num_left)
        after = tuple(rows[-1][name] for name in key_columns(table))


async def _encrypt_row(session: WriteSession, table: type[Base], row: dict[str, object]) -> bool:
    """Encrypts the content of one row. Returns False and changes nothing if the row stays plain."""
    tenant_id = str(row["tenant"])
    if table.__tablename__ == "idempotency_keys" and not tenant_id.startswith("ten_"):
        return False
    try:
        sealer = await row_sealer(session, TenantId(tenant_id))
    except NotPermitted:
        return False
    key = tuple(row[name] for name in key_columns(table))
    content = {column.attribute: row[column.attribute] for column in content_columns(table)}
    plain = {name: value for name, value in content.items() if not is_sealed(value)}
    await repository.replace_content(session, table, key, sealer.sealed(table, plain, *key))
    return True
