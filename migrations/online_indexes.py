"""Makes and drops indexes of tables that may be large, while other processes write to these tables.

On PostgreSQL, a plain CREATE INDEX lets no other process write to the table until the index is built. With CONCURRENTLY
it does, and then it cannot be part of a transaction. So a revision that calls one of these functions changes nothing
else: it is not taken back if it fails, and the next upgrade repeats it.
On SQLite, which has one writer in any case, the index is made as usual.
Invariant: after `create_index_online`, the index exists and is complete. A build that was interrupted leaves an index
that PostgreSQL keeps up to date but does not use; this is dropped and built again.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

_IS_COMPLETE = sa.text(
    "SELECT i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
    " WHERE c.relname = :name AND pg_table_is_visible(c.oid)"
)


def create_index_online(
    name: str, table: str, columns: Sequence[str], *, where: sa.ColumnElement[bool] | None = None
) -> None:
    """Makes an index over the rows for which the condition `where` is true; None means all rows.

    May wait long for transactions that began before it. While it waits, nobody waits for it.
    """
    if op.get_bind().dialect.name != "postgresql":
        op.create_index(name, table, columns, sqlite_where=where)
        return
    with op.get_context().autocommit_block():
        is_complete = op.get_bind().execute(_IS_COMPLETE, {"name": name}).scalar()
        if is_complete:
            return
        if is_complete is not None:
            op.drop_index(name, table, postgresql_concurrently=True)
        op.create_index(name, table, columns, postgresql_where=where, postgresql_concurrently=True)


def drop_index_online(name: str, table: str) -> None:
    """Drops an index if it exists."""
    if op.get_bind().dialect.name != "postgresql":
        op.drop_index(name, table, if_exists=True)
        return
    with op.get_context().autocommit_block():
        op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)
