"""Contains the SQL statements over the tenants' data keys. Never commits: the caller that opened the session does.

Invariant: each statement is over one tenant, except `count_by_master`, `find_one_of` and `find_other_than`, which are for
rotations and for the check at the start, and `count_plain`, `find_plain` and `replace_content`, which encrypt older rows.
"""

from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import ColumnElement, LargeBinary, Text, and_, delete, func, not_, or_, select, tuple_, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import InstrumentedAttribute

from graftwork.platform.contents.columns import SEALED_MARK, SEALED_PREFIX, content_columns
from graftwork.platform.contents.rows import encrypts_rows
from graftwork.platform.database import Base, ReadSession, WriteSession
from graftwork.platform.encryption.master_keys import WrappedKey
from graftwork.platform.encryption.tables import DataKeyRow
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.repository import insert_once
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus


async def find(session: ReadSession, scope: TenantScope) -> WrappedKey | None:
    row = await session.get(DataKeyRow, scope)
    return None if row is None else WrappedKey(row.master_id, row.wrapped)


async def add(session: WriteSession, scope: TenantScope, wrapped: WrappedKey, now: float) -> bool:
    """Stores the data key of a tenant. Returns False and changes nothing if the tenant has one."""
    values = {"tenant_id": scope, "master_id": wrapped.master_id, "wrapped": wrapped.blob, "created_at": now}
    return await insert_once(session, DataKeyRow, values)


async def is_deleted_tenant(session: WriteSession, scope: TenantScope) -> bool:
    """Returns whether the tenant was deleted. If not, it cannot be deleted before the transaction ends."""
    statement = select(TenantRow.status).where(TenantRow.id == scope).with_for_update(read=True, key_share=True)
    return await session.scalar(statement) == TenantStatus.DELETED


async def replace(session: WriteSession, scope: TenantScope, old: WrappedKey, new: WrappedKey) -> bool:
    """Replaces the wrapping of a data key. Returns False if the key has gone, or was wrapped anew meanwhile."""
    mine = update(DataKeyRow).where(DataKeyRow.tenant_id == scope, DataKeyRow.master_id == old.master_id)
    values = mine.values(master_id=new.master_id, wrapped=new.blob).execution_options(synchronize_session=False)
    return cast(CursorResult[Any], await session.execute(values)).rowcount == 1


async def destroy(session: WriteSession, scope: TenantScope) -> None:
    await session.execute(delete(DataKeyRow).where(DataKeyRow.tenant_id == scope))


async def count_by_master(session: ReadSession) -> dict[str, int]:
    """Returns how many data keys each master key has wrapped."""
    counted = await session.execute(select(DataKeyRow.master_id, func.count()).group_by(DataKeyRow.master_id))
    return {master_id: int(number) for master_id, number in counted.all()}


async def find_one_of(session: ReadSession, master_id: str) -> tuple[TenantId, WrappedKey] | None:
    """Returns any data key that a master key has wrapped."""
    row = await session.scalar(select(DataKeyRow).where(DataKeyRow.master_id == master_id).limit(1))
    return None if row is None else (TenantId(row.tenant_id), WrappedKey(row.master_id, row.wrapped))


async def find_other_than(session: ReadSession, master_id: str, limit: int) -> list[tuple[TenantId, WrappedKey]]:
    """Returns data keys that other master keys than this one have wrapped."""
    others = select(DataKeyRow).where(DataKeyRow.master_id != master_id).order_by(DataKeyRow.tenant_id).limit(limit)
    return [(TenantId(row.tenant_id), WrappedKey(row.master_id, row.wrapped)) for row in await session.scalars(others)]


# The content of rows


async def count_plain(session: ReadSession, table: type[Base]) -> int:
    """Returns how many rows of a table have content that is not encrypted."""
    return await session.scalar(select(func.count()).select_from(table).where(_is_plain(table))) or 0


async def find_plain(
    session: WriteSession, table: type[Base], after: tuple[Any, ...] | None, limit: int
) -> list[dict[str, Any]]:
    """Returns rows whose content is not encrypted, in the order of the primary key, and locks them.

    Each is given by attribute: its primary key, the tenant or owner, and the columns of content. `after` is the primary
    key of the last row that the caller has.
    """
    keys = table.__mapper__.primary_key
    owner = "tenant_id" if "tenant_id" in table.__table__.c else "owner"
    content = [getattr(table, column.attribute) for column in content_columns(table)]
    statement = select(*keys, table.__table__.c[owner].label("tenant"), *content).where(_is_plain(table))
    if after is not None:
        statement = statement.where(tuple_(*keys) > after if len(keys) > 1 else keys[0] > after[0])
    names = [key.name for key in keys] + ["tenant"] + [column.attribute for column in content_columns(table)]
    found = await session.execute(statement.order_by(*keys).limit(limit).with_for_update())
    return [dict(zip(names, row, strict=True)) for row in found.all()]


async def replace_content(
    session: WriteSession, table: type[Base], key: tuple[Any, ...], values: Mapping[str, Any]
) -> None:
    """Replaces the content of one row, by attribute."""
    is_it = [column == value for column, value in zip(table.__mapper__.primary_key, key, strict=True)]
    await session.execute(update(table).where(*is_it).values(**values).execution_options(synchronize_session=False))


def _is_plain(table: type[Base]) -> ColumnElement[bool]:
    """Returns the condition that a row has content that is not encrypted."""
    return or_(*(_holds_plain(getattr(table, one.attribute), one.holds_bytes) for one in content_columns(table)))


def _holds_plain(column: InstrumentedAttribute[Any], holds_bytes: bool) -> ColumnElement[bool]:
    if holds_bytes:
        sealed = func.substr(column, 1, len(SEALED_PREFIX), type_=LargeBinary) == SEALED_PREFIX
    else:
        sealed = sql_cast(column, Text).startswith(f'["{SEALED_MARK}"')
    return and_(column.is_not(None), not_(sealed))


def plain_characters(session: ReadSession, column: InstrumentedAttribute[Any]) -> ColumnElement[int]:
    """Returns the length of what a JSON column of content holds, in characters of plain JSON, encrypted or not.

    The column's plain values are objects. An encrypted one is a list, whose second element is the length.
    """
    stored = func.length(sql_cast(column, Text))
    return func.coalesce(column[1].as_integer(), stored) if encrypts_rows(session) else stored
