"""Contains the SQL statements that keep the sums of the usage ledger by hour and day, and that prune its rows.

Never commits: the caller that opened the session does. A row of the ledger is in the sums, or in `usage_unrolled`: each
statement that moves rows from the one to the other is in one transaction. Callers hold `hold_rollup`, so one process
moves rows at a time.
Invariant: once the state is complete, the sums and the queued rows together are the ledger, with the rows that were
pruned. A queued row that was deleted for its tenant's retention is in neither.
"""

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.tables import RollupStateRow, UnrolledUsageRow, UsageRow, UsageSumRow
from graftwork.platform.tenancy.repository import ERASED_ADAPTER

HALF = 10**9
HOUR_S = 3600
DAY_S = 86_400
HOUR, DAY = "hour", "day"
_LOCK = 0x726F6C6C  # any number that every gateway agrees on
KEY = tuple(column.name for column in UsageSumRow.__table__.primary_key)
SUMMED = tuple(
    name
    for name in UsageSumRow.__table__.columns.keys()  # noqa: SIM118
    if name not in KEY and name != "requests" and not name.endswith(("_high", "_low"))
)
"""Columns that the ledger and the sums both have."""
SPLIT = ("kv_byte_seconds", "cost_atoms", "kv_cost_atoms")
"""Columns of the ledger whose sums may need more than 64 bits. Each has two columns in the sums (see `HALF`)."""
DIMENSIONS = {
    "day": "u.day",
    "key": "u.key_id",
    "adapter": "coalesce(u.adapter, '')",
    "base_model": "u.model",
    "adapter_model": "u.model",
    "tier": "coalesce(u.service_tier, '')",
    "organisation": "coalesce(u.organisation_id, '')",
    "user": "coalesce(u.end_user_id, '')",
    "batch": "coalesce(u.batch_id, '')",
}
"""By dimension, the name that a row of the ledger has in it. The models of rows with an adapter stand apart, because they
are erased with their tenant.
"""
HOURLY = ("day",)
"""Dimensions with sums of hours too. In an hour, the others have nearly as many names as requests."""
_STARTS = {
    "sqlite": "CAST(u.at AS INTEGER) / s.seconds * s.seconds",
    "postgresql": "CAST(floor(u.at) AS BIGINT) / s.seconds * s.seconds",
}
"""The beginning of the hour or day. The time is a whole number before the division, because a quotient may round up."""
_SPANS = " UNION ALL ".join(
    f"SELECT '{span}' AS span, {seconds} AS seconds, '{dimension}' AS dimension"
    for span, seconds in ((HOUR, HOUR_S), (DAY, DAY_S))
    for dimension in DIMENSIONS
    if span == DAY or dimension in HOURLY
)
_CASES = " ".join(f"WHEN '{dimension}' THEN {name}" for dimension, name in DIMENSIONS.items())
_NAME = f"CASE s.dimension {_CASES} END"
_HAS_NAME = (
    "CASE s.dimension WHEN 'base_model' THEN u.adapter IS NULL"
    " WHEN 'adapter_model' THEN u.adapter IS NOT NULL ELSE true END"
)
_OF_KEYS = "JOIN usage_events AS u ON u.tenant_id = t.tenant_id AND u.request_id = t.request_id"
_FIRST = "SELECT tenant_id, request_id FROM usage_unrolled ORDER BY tenant_id, request_id LIMIT :limit"
_QUEUE = text(
    "INSERT INTO usage_unrolled (tenant_id, request_id) SELECT tenant_id, request_id FROM usage_events"
    " WHERE (tenant_id, request_id) > (:after_tenant, :after_request)"
    " AND (tenant_id, request_id) <= (:tenant, :request) ON CONFLICT DO NOTHING"
)
_LAST_OF_PART = text(
    "SELECT tenant_id, request_id FROM usage_events WHERE (tenant_id, request_id) > (:after_tenant, :after_request)"
    " ORDER BY tenant_id, request_id LIMIT 1 OFFSET :offset"
)
_LAST_OF_ALL = text("SELECT tenant_id, request_id FROM usage_events ORDER BY tenant_id DESC, request_id DESC LIMIT 1")


async def hold_rollup(session: WriteSession, *, waits: bool = False) -> bool:
    """Takes the right to move rows to the sums, until the end of the transaction. Returns whether it is taken.

    It is not if another process has it, unless the call `waits`. SQLite has one writer at a time, who has the right.
    """
    if session.get_bind().dialect.name == "sqlite":
        return True
    if waits:
        await session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        return True
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_LOCK))))


async def find_state(session: ReadSession) -> RollupStateRow | None:
    """Returns how far old rows are queued; None before the first roll-up of an empty database."""
    return await session.get(RollupStateRow, 1, populate_existing=True)


async def begin_state(session: WriteSession) -> RollupStateRow:
    """Returns the state, and adds it if there is none: complete if the ledger has no row."""
    found = await find_state(session)
    if found is None:
        is_empty = (await session.execute(select(UsageRow.request_id).limit(1))).first() is None
        found = RollupStateRow(id=1, after_tenant_id="", after_request_id="", is_complete=is_empty, pruned_before=0)
        session.add(found)
    return found


async def queue_older(session: WriteSession, state: RollupStateRow, limit: int) -> int:
    """Queues up to `limit` rows of the ledger that are older than the sums. Returns their number; fewer are the last."""
    after = {"after_tenant": state.after_tenant_id, "after_request": state.after_request_id}
    end = (await session.execute(_LAST_OF_PART, {**after, "offset": limit - 1})).first()
    is_last = end is None
    end = end or (await session.execute(_LAST_OF_ALL)).first()
    num_queued = 0
    if end is not None:
        queued = await session.execute(_QUEUE, {**after, "tenant": end[0], "request": end[1]})
        num_queued = cast(CursorResult[Any], queued).rowcount
        state.after_tenant_id, state.after_request_id = end[0], end[1]
    state.is_complete = is_last
    return num_queued


async def roll_up(session: WriteSession, limit: int) -> int:
    """Adds up to `limit` queued rows to the sums, and takes them from the queue. Returns their number."""
    dialect = session.get_bind().dialect.name
    if dialect == "sqlite":
        await session.execute(text(into_sums(dialect, f"({_FIRST}) AS t {_OF_KEYS}")), {"limit": limit})
        removed = f"DELETE FROM usage_unrolled WHERE (tenant_id, request_id) IN ({_FIRST})"
        return cast(CursorResult[Any], await session.execute(text(removed), {"limit": limit})).rowcount
    statement = (
        f"WITH taken AS (DELETE FROM usage_unrolled WHERE (tenant_id, request_id) IN ({_FIRST})"
        f" RETURNING tenant_id, request_id), added AS ({into_sums(dialect, f'taken AS t {_OF_KEYS}')}) SELECT count(*) FROM taken"
    )
    return int((await session.execute(text(statement), {"limit": limit})).scalar_one())


def into_sums(dialect: str, source: str, condition: str = "true") -> str:
    """Returns the statement that adds rows of the ledger to their sums. `source` is where they come from, as `u`."""
    own = {
        "tenant_id": "u.tenant_id",
        "span": "s.span",
        "dimension": "s.dimension",
        "start_at": _STARTS[dialect],
        "name": _NAME,
        "price_id": "coalesce(u.price_id, '')",
    }
    halves = {f"{name}_{part}": f"sum(u.{name} {sign} {HALF})" for name in SPLIT for part, sign in _PARTS}
    sums = {"requests": "count(*)"} | {name: f"sum(u.{name})" for name in SUMMED} | halves
    groups = ", ".join(str(number) for number in range(1, len(own) + 1))
    added = ", ".join(f"{name} = usage_sums.{name} + excluded.{name}" for name in sums)
    return (
        f"INSERT INTO usage_sums ({', '.join((*own, *sums))}) SELECT {', '.join((*own.values(), *sums.values()))}"
        f" FROM {source} CROSS JOIN ({_SPANS}) AS s WHERE {_HAS_NAME} AND {condition} GROUP BY {groups}"
        f" ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET {added}"
    )


_PARTS = (("high", "/"), ("low", "%"))


async def erase_names_in_sums(session: WriteSession, tenant_id: TenantId) -> None:
    """Replaces the adapters' names in all sums of a tenant. Sums that differ in the name alone become one."""
    sums = tuple(name for name in UsageSumRow.__table__.columns.keys() if name not in KEY)  # noqa: SIM118
    named = "tenant_id = :tenant AND dimension IN ('adapter', 'adapter_model') AND name NOT IN ('', :erased)"
    key = ", ".join(":erased AS name" if name == "name" else name for name in KEY)
    grouped = ", ".join(name for name in KEY if name != "name")
    added = ", ".join(f"{name} = usage_sums.{name} + excluded.{name}" for name in sums)
    merge = (
        f"INSERT INTO usage_sums ({', '.join((*KEY, *sums))}) SELECT {key}, {', '.join(f'sum({name})' for name in sums)}"
        f" FROM usage_sums WHERE {named} GROUP BY {grouped} ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET {added}"
    )
    values = {"tenant": tenant_id, "erased": ERASED_ADAPTER}
    await session.execute(text(merge), values)
    await session.execute(text(f"DELETE FROM usage_sums WHERE {named}"), values)


async def find_tenants_before(session: ReadSession, before: int) -> Sequence[TenantId]:
    """Returns the tenants with sums of days before a time."""
    row = UsageSumRow
    old = select(row.tenant_id).where(row.span == DAY, row.dimension == "day", row.start_at < before).distinct()
    return [TenantId(tenant_id) for tenant_id in await session.scalars(old.order_by(row.tenant_id))]


async def mark_pruned(session: WriteSession, before: int) -> None:
    """Notes that rows before a time may be deleted from now on. A later time that was noted stays."""
    later = update(RollupStateRow).where(RollupStateRow.pruned_before < before)
    await session.execute(later.values(pruned_before=before).execution_options(synchronize_session=False))


async def find_prunable(session: ReadSession, tenant_id: TenantId, before: int, limit: int) -> Sequence[UsageRow]:
    """Returns up to `limit` rows of a tenant before a time that are in the sums, oldest first."""
    is_queued = (
        select(UnrolledUsageRow.request_id)
        .where(
            UnrolledUsageRow.tenant_id == UsageRow.tenant_id,
            UnrolledUsageRow.request_id == UsageRow.request_id,
        )
        .exists()
    )
    old = select(UsageRow).where(UsageRow.tenant_id == tenant_id, UsageRow.at < before, ~is_queued)
    return (await session.scalars(old.order_by(UsageRow.at, UsageRow.request_id).limit(limit))).all()


async def delete_rows(session: WriteSession, tenant_id: TenantId, request_ids: Sequence[str]) -> None:
    """Deletes rows of the ledger. They must be in the sums."""
    gone = delete(UsageRow).where(UsageRow.tenant_id == tenant_id, UsageRow.request_id.in_(list(request_ids)))
    await session.execute(gone.execution_options(synchronize_session=False))


async def delete_sums(session: WriteSession, tenant_id: TenantId, before: int) -> int:
    """Deletes the sums of a tenant from before the beginning of a day. Returns how many. Its rows must be deleted first."""
    old = delete(UsageSumRow).where(UsageSumRow.tenant_id == tenant_id, UsageSumRow.start_at < before)
    gone = await session.execute(old.execution_options(synchronize_session=False))
    return cast(CursorResult[Any], gone).rowcount
