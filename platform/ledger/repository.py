"""Contains the SQL statements of the usage ledger. Never commits: the caller that opened the session does."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from sqlalchemy import ColumnElement, case, delete, exists, func, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import InstrumentedAttribute

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.ledger.spend_rows import add_spend
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.ledger.usage import UsageEvent, UsageGroup, UsageSummary, Work
from graftwork.platform.prices.rates import Cost, Quantities
from graftwork.platform.prices.tables import PriceListRow
from graftwork.platform.tenancy.repository import ERASED_ADAPTER, insert_once
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus

_GROUP_COLUMNS = {
    UsageGroup.DAY: UsageRow.day,
    UsageGroup.ADAPTER: UsageRow.adapter,
    UsageGroup.SESSION: UsageRow.session_id,
    UsageGroup.KEY: UsageRow.key_id,
    UsageGroup.TENANT: UsageRow.tenant_id,
    UsageGroup.TIER: UsageRow.service_tier,
    UsageGroup.PRICE: UsageRow.price_id,
}
_LEDGER_FIELDS = tuple(name for name in UsageRow.__table__.columns.keys() if not name.endswith("_atoms"))  # noqa: SIM118
_SUMMED = (
    UsageRow.prompt_tokens,
    UsageRow.cached_tokens,
    UsageRow.host_tokens,
    UsageRow.disk_tokens,
    UsageRow.completion_tokens,
    UsageRow.adapter_bytes,
    *(getattr(UsageRow, one.name) for one in fields(Work)),
)
_WIDELY_SUMMED = (UsageRow.kv_byte_seconds, UsageRow.cost_atoms, UsageRow.kv_cost_atoms)
"""Columns whose sums may have more than the 64 bits of SQLite's sums. So their halves are added up: what is above
`_HALF`, and the rest.
"""
_HALF = 10**9


async def add_usage(session: WriteSession, event: UsageEvent) -> bool:
    """Adds the usage of one request to the ledger, the table with the usage of every request, and to what its owners have
    used in the month. Let nothing that can wait follow in the transaction: other requests may wait for its rows.

    Returns True. If the request was recorded before, changes nothing and returns False.
    """
    values = {name: getattr(event, name) for name in _LEDGER_FIELDS}
    values |= {"cost_atoms": event.cost.atoms, "kv_cost_atoms": event.cost.kv_atoms}
    if event.adapter is not None:
        values |= _adapter_names(event.tenant_id, {"model": event.model, "adapter": event.adapter})
    if not await insert_once(session, UsageRow, values):
        return False
    await add_spend(session, event)
    return True


async def has_usage(session: ReadSession, tenant_id: TenantId, request_id: str) -> bool:
    """Returns whether the usage of this request of a tenant was recorded."""
    return await session.get(UsageRow, (tenant_id, request_id)) is not None


async def sum_usage(
    session: ReadSession, tenant_id: TenantId | None, start: float, end: float, group_by: UsageGroup
) -> list[UsageSummary]:
    """Adds up the usage of each group of requests that were recorded in the time [start, end)."""
    conditions = [UsageRow.at >= start, UsageRow.at < end]
    if tenant_id is not None:
        conditions.append(UsageRow.tenant_id == tenant_id)
    return await _sums(session, _GROUP_COLUMNS[group_by], conditions)


async def sum_sessions(
    session: ReadSession, tenant_id: TenantId, session_ids: Collection[SessionId]
) -> dict[SessionId, UsageSummary]:
    """Adds up all usage of each of these sessions. A session without usage is left out."""
    mine = [UsageRow.tenant_id == tenant_id, UsageRow.session_id.in_(list(session_ids))]
    return {SessionId(one.group or ""): one for one in await _sums(session, UsageRow.session_id, mine)}


async def _sums(
    session: ReadSession, group: InstrumentedAttribute[Any], conditions: Sequence[ColumnElement[bool]]
) -> list[UsageSummary]:
    sums = [func.sum(column) for column in _SUMMED]
    halves = [func.sum(half) for column in _WIDELY_SUMMED for half in (column // _HALF, column % _HALF)]
    currency = PriceListRow.currency
    priced = select(group, currency, func.count(), *sums, *halves).outerjoin(
        PriceListRow, PriceListRow.id == UsageRow.price_id
    )
    statement = priced.where(*conditions).group_by(group, currency)
    summaries: dict[str | None, UsageSummary] = {}
    for key, code, requests, *found in await session.execute(statement):
        summary = _summary(key, code, requests, [int(figure) for figure in found])
        summaries[key] = summaries.get(key, UsageSummary(key)) + summary
    return list(summaries.values())


def _summary(group: str | None, currency: str | None, requests: int, sums: Sequence[int]) -> UsageSummary:
    prompt, cached, host, disk, completion, adapter_bytes, *rest = sums
    work, halves = Work(*rest[: len(fields(Work))]), rest[len(fields(Work)) :]
    kv, atoms, kv_atoms = (high * _HALF + low for high, low in zip(halves[::2], halves[1::2], strict=True))
    used = Quantities(prompt - cached, cached - host - disk, host, disk, completion, kv, adapter_bytes)
    costs = {} if currency is None else {currency: Cost(atoms, kv_atoms)}
    return UsageSummary(group, requests, used, costs, work)


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


def _adapter_names(tenant_id: TenantId, names: Mapping[str, str]) -> dict[str, ColumnElement[str]]:
    """Returns the names to store in a new usage row, by column. For a deleted tenant, its adapter has no name any more.

    Rows may come late: a gateway that was down stores what it finds in its journal when it starts again.
    """
    is_deleted = exists().where(TenantRow.id == tenant_id, TenantRow.status == TenantStatus.DELETED)
    return {column: case((is_deleted, ERASED_ADAPTER), else_=name) for column, name in names.items()}
