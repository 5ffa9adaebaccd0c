"""Writes what tenants say into rows, and reads it back: as it is, or encrypted for the tenant.

    a repository ──► row_sealer(session, tenant) ─► RowSealer.sealed ──► INSERT, UPDATE
    SELECT ──► RowOpener.opened ◄── row_opener(session, tenant) ◄─ a repository

Owns the way from repositories to what encrypts: a RowContent, which is attached to a database. Without one, content is
stored as it is. Never encrypts anything itself. `columns.py` says which columns hold content.
Invariant: a value is read only at the place for which it was written: table, column, primary key and tenant.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from graftwork.platform.contents.columns import content_columns, is_sealed, key_columns
from graftwork.platform.database import Base, Database, ReadSession, WriteSession
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import TenantId

_ATTACHED = "row_content"


class RowSealer(Protocol):
    """Prepares the content of one tenant's rows to be stored."""

    def sealed(self, table: type[Base], values: Mapping[str, Any], *key: object) -> Mapping[str, Any]:
        """Returns the values of a row as they are stored, by attribute. None stays None.

        `key` is the primary key of the row; it may be left out if `values` contains it.
        """
        ...


class RowOpener(Protocol):
    """Reads the content of one tenant's rows."""

    def opened(self, table: type[Base], attribute: str, stored: Any, *key: object) -> Any:
        """Returns the content of a column. `key` is the primary key of the row. None stays None.

        Raises InternalFailure for a value that was changed, cut or moved, or whose key is missing.
        """
        ...


class RowContent(Protocol):
    """What encrypts content: it knows the keys of all tenants."""

    async def sealer(self, session: WriteSession, tenant_id: TenantId) -> RowSealer:
        """Returns what writes the content of a tenant. Raises NotPermitted if the tenant is deleted, and Unavailable."""
        ...

    async def opener(self, session: ReadSession, tenant_id: TenantId) -> RowOpener:
        """Returns what reads the content of a tenant. Raises Unavailable if the keys cannot be used now."""
        ...


class PlainRows:
    """Stores content as it is. Refuses what is encrypted."""

    def sealed(self, table: type[Base], values: Mapping[str, Any], *key: object) -> Mapping[str, Any]:
        return values

    def opened(self, table: type[Base], attribute: str, stored: Any, *key: object) -> Any:
        if is_sealed(stored):
            raise InternalFailure(
                "What is stored here is encrypted, and this server has no key for it. The operator must name the file of "
                "master keys in master_key_file, or restore the table data_keys from the backup that the other tables "
                "are from. What an erased tenant has left cannot be read again.",
                code="row_key_missing",
            )
        return stored


PLAIN_ROWS = PlainRows()


def attach_row_content(database: Database, content: RowContent) -> None:
    """Lets all sessions that `database` opens from now on encrypt content."""
    database.session_info[_ATTACHED] = content


def encrypts_rows(session: ReadSession) -> bool:
    """Returns whether content is encrypted in this database."""
    return _ATTACHED in session.info


async def row_sealer(session: WriteSession, tenant_id: TenantId) -> RowSealer:
    """Returns what writes the content of a tenant in this session. Raises NotPermitted, and Unavailable."""
    content: RowContent | None = session.info.get(_ATTACHED)
    return PLAIN_ROWS if content is None else await content.sealer(session, tenant_id)


async def row_opener(session: ReadSession, tenant_id: TenantId) -> RowOpener:
    """Returns what reads the content of a tenant in this session. Raises Unavailable."""
    content: RowContent | None = session.info.get(_ATTACHED)
    return PLAIN_ROWS if content is None else await content.opener(session, tenant_id)


def opened_row(opener: RowOpener, table: type[Base], row: dict[str, Any]) -> dict[str, Any]:
    """Opens the content of a whole row, by column, in place, and returns it. Raises InternalFailure."""
    key = [row[name] for name in key_columns(table)]
    for column in content_columns(table):
        row[column.name] = opener.opened(table, column.attribute, row[column.name], *key)
    return row
