"""Contains the SQL statements over the tenants' data keys. Never commits: the caller that opened the session does.

Invariant: each statement is over one tenant, except `count_by_master`, `find_one_of` and `find_other_than`, which are for
rotations and for the check at the start.
"""

from typing import Any, cast

from sqlalchemy import delete, func, select, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.encryption.master_keys import WrappedKey
from graftwork.platform.encryption.tables import DataKeyRow
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.repository import insert_once


async def find(session: ReadSession, scope: TenantScope) -> WrappedKey | None:
    row = await session.get(DataKeyRow, scope)
    return None if row is None else WrappedKey(row.master_id, row.wrapped)


async def add(session: WriteSession, scope: TenantScope, wrapped: WrappedKey, now: float) -> bool:
    """Stores the data key of a tenant. Returns False and changes nothing if the tenant has one."""
    values = {"tenant_id": scope, "master_id": wrapped.master_id, "wrapped": wrapped.blob, "created_at": now}
    return await insert_once(session, DataKeyRow, values)


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
