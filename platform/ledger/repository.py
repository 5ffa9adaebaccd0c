"""Contains the SQL statements that write the usage ledger. Never commits: the caller that opened the session does."""

from collections.abc import Collection, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, cast

from sqlalchemy import Executable, String, bindparam, case, delete, exists, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import CursorResult

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import RequestId, TenantId
from graftwork.platform.ledger.spend_rows import add_spend
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.ledger.usage import UsageEvent, UsageKey
from graftwork.platform.tenancy.repository import ERASED_ADAPTER
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus

_NAMES = ("model", "adapter")
_NAMED, _OF_TENANT = "named_{}", "of_tenant"
"""Parameters beside those that have the names of columns."""
_STATUSES = (
    select(TenantRow.id, TenantRow.status)
    .where(TenantRow.id.in_(bindparam("tenant_ids", expanding=True)))
    .order_by(TenantRow.id)
    .with_for_update(read=True, key_share=True)
)
_LEDGER_FIELDS = tuple(name for name in UsageRow.__table__.columns.keys() if not name.endswith("_atoms"))  # noqa: SIM118


async def add_usage(session: WriteSession, event: UsageEvent) -> bool:
    """Adds the usage of one request to the ledger, the table with the usage of every request, and to what its owners have
    used in the month. Let nothing that can wait follow in the transaction: other requests may wait for its rows.

    Returns True. If the request was recorded before, changes nothing and returns False.
    """
    values = _columns(event)
    if event.adapter is not None:
        values |= {_NAMED.format(name): values.pop(name) for name in _NAMES} | {_OF_TENANT: event.tenant_id}
    added = await session.execute(_adding(session.get_bind().dialect.name, event.adapter is not None), values)
    if cast(CursorResult[Any], added).rowcount != 1:
        return False
    await add_spend(session, [event])
    return True


async def add_usages(session: WriteSession, events: Sequence[UsageEvent]) -> set[UsageKey]:
    """Adds the usage of several requests, each as `add_usage` does. Returns those that were not recorded before.

    All such groups add to their rows in the same order, so two of them never wait for each other.
    """
    if len(events) == 1:
        return {events[0].key} if await add_usage(session, events[0]) else set()
    ordered = sorted(events, key=attrgetter("key"))
    deleted = await _deleted_tenants(session, {event.tenant_id for event in ordered if event.adapter is not None})
    rows = [_columns(event) for event in ordered]
    for row in rows:
        if row["adapter"] is not None and row["tenant_id"] in deleted:
            row |= dict.fromkeys(_NAMES, ERASED_ADAPTER)
    added = await session.execute(_adding_some(session.get_bind().dialect.name), rows)
    new = {(TenantId(tenant_id), RequestId(request_id)) for tenant_id, request_id in added.all()}
    await add_spend(session, [event for event in ordered if event.key in new])
    return new


def _columns(event: UsageEvent) -> dict[str, Any]:
    values = {name: getattr(event, name) for name in _LEDGER_FIELDS}
    return values | {"cost_atoms": event.cost.atoms, "kv_cost_atoms": event.cost.kv_atoms}


async def _deleted_tenants(session: WriteSession, tenant_ids: Collection[TenantId]) -> set[TenantId]:
    """Returns which of these tenants are deleted. None of the others is before the transaction ends."""
    if not tenant_ids:
        return set()
    found = await session.execute(_STATUSES, {"tenant_ids": sorted(tenant_ids)})
    return {TenantId(tenant_id) for tenant_id, status in found.all() if status == TenantStatus.DELETED}


async def has_usage(session: ReadSession, tenant_id: TenantId, request_id: str) -> bool:
    """Returns whether the usage of this request of a tenant was recorded."""
    return await session.get(UsageRow, (tenant_id, request_id)) is not None


async def erase_adapter_names(session: WriteSession, tenant_id: TenantId, limit: int) -> int:
    """Replaces the adapter's name in up to `limit` usage rows of a tenant. Returns the number of changed rows."""
    named = (UsageRow.tenant_id == tenant_id, UsageRow.adapter.is_not(None), UsageRow.adapter != ERASED_ADAPTER)
    some = select(UsageRow.request_id).where(*named).limit(limit)
    erase = update(UsageRow).where(UsageRow.tenant_id == tenant_id, UsageRow.request_id.in_(some))
    erase = erase.values(model=ERASED_ADAPTER, adapter=ERASED_ADAPTER).execution_options(synchronize_session=False)
    return cast(CursorResult[Any], await session.execute(erase)).rowcount


async def delete_older(session: WriteSession, tenant_id: TenantId, before: float, limit: int) -> int:
    """Deletes up to `limit` usage rows of a tenant from before a time in Unix seconds. Returns how many."""
    some = select(UsageRow.request_id).where(UsageRow.tenant_id == tenant_id, UsageRow.at < before).limit(limit)
    old = delete(UsageRow).where(UsageRow.tenant_id == tenant_id, UsageRow.request_id.in_(some))
    done = await session.execute(old.execution_options(synchronize_session=False))
    return cast(CursorResult[Any], done).rowcount


@cache
def _adding_some(dialect: str) -> Executable:
    """Returns the statement that adds rows with the names that they have, and returns the keys of those that are new."""
    return _adding(dialect, has_adapter=False).returning(
        UsageRow.__table__.c.tenant_id, UsageRow.__table__.c.request_id
    )


@cache
def _adding(dialect: str, has_adapter: bool) -> postgresql.Insert | sqlite.Insert:
    """Returns the statement that adds a row, unless the request has one. It is built once, for every request runs it.

    For a deleted tenant, its adapter has no name any more. Rows may come late: a gateway that was down stores what it
    finds in its journal when it starts again.
    """
    insert = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(UsageRow.__table__)  # type: ignore[arg-type]
    if has_adapter:
        of_tenant = TenantRow.id == bindparam(_OF_TENANT, type_=String)
        is_deleted = exists().where(of_tenant, TenantRow.status == TenantStatus.DELETED)
        named = {name: bindparam(_NAMED.format(name), type_=String) for name in _NAMES}
        insert = insert.values({name: case((is_deleted, ERASED_ADAPTER), else_=one) for name, one in named.items()})
    return insert.on_conflict_do_nothing()
