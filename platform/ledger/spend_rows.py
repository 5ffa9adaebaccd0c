"""Contains the SQL statements over what owners of limits have used in a month: the sums of rows of the usage ledger.

Never commits: the caller that opened the session does. Every request adds to these rows, so the statements are built
once.
Invariant: what an owner has used in a month is the sum of the ledger's rows of that month that name it, from the time on
that this table exists and, for an organisation, that the tenant belongs to it.
"""

import zlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from sqlalchemy import Executable, bindparam, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.tables import MonthlySpendRow
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.quotas.budget import Spent

_SHARDS = 8
"""The rows of one owner. Requests that end at the same time wait for each other only if they have the same one."""
_HALF = 10**9
_SUMS = ("requests", "tokens", "cost_high", "cost_low")
_TABLE = MonthlySpendRow.__table__
_SPENT = (
    select(_TABLE.c.owner_id, _TABLE.c.currency, *(func.sum(_TABLE.c[name]) for name in _SUMS[1:]))
    .where(_TABLE.c.owner_id.in_(bindparam("owner_ids", expanding=True)), _TABLE.c.month == bindparam("month"))
    .group_by(_TABLE.c.owner_id, _TABLE.c.currency)
)


async def add_spend(session: WriteSession, events: Sequence[UsageEvent]) -> None:
    """Adds new rows of the ledger to what their organisation, tenant, key and end user have used in their months.

    All transactions add to these rows in the order of `_Owned`, so two of them never wait for each other.
    """
    if not events:
        return
    shard = zlib.crc32(events[0].request_id.encode()) % _SHARDS
    sums: dict[_Owned, list[int]] = {}
    for event in events:
        month, currency, tenant_id = event.day[:7], event.currency or "", event.tenant_id
        used = (1, event.total_tokens, event.cost.atoms)
        owners = (event.organisation_id, tenant_id, event.first_key_id or event.key_id, event.end_user_id)
        for level, owner_id in enumerate(owners):
            if owner_id is not None:
                owned = _Owned(level, owner_id, month, currency, tenant_id if level else None)
                before = sums.get(owned)
                sums[owned] = [*used] if before is None else [a + b for a, b in zip(before, used, strict=True)]
    rows = [
        {
            "owner_id": owned.owner_id,
            "month": owned.month,
            "currency": owned.currency,
            "tenant_id": owned.tenant_id,
            "shard": shard,
            "requests": sums[owned][0],
            "tokens": sums[owned][1],
            "cost_high": sums[owned][2] // _HALF,
            "cost_low": sums[owned][2] % _HALF,
        }
        for owned in sorted(sums, key=lambda one: one[:4])
    ]
    await session.execute(_adding(session.get_bind().dialect.name), rows)


class _Owned(NamedTuple):
    """One owner's sums of a month, in one currency."""

    level: int
    """0 for an organisation, 1 for a tenant, 2 for a key, 3 for an end user."""
    owner_id: str
    month: str
    currency: str
    tenant_id: TenantId | None


async def find_spent(session: ReadSession, owner_ids: Sequence[str], month: str) -> dict[str, Spent]:
    """Returns what each of these owners has used in a month. Leaves out owners without use."""
    found: dict[str, Spent] = {}
    rows = await session.execute(_SPENT, {"owner_ids": list(owner_ids), "month": month})
    for owner_id, currency, tokens, high, low in rows.all():
        before = found.get(owner_id, Spent())
        atoms = {**before.atoms, currency: int(high) * _HALF + int(low)} if currency else before.atoms
        found[owner_id] = Spent(before.tokens + int(tokens), atoms)
    return found


async def drop_spend_before(session: WriteSession, month: str) -> None:
    """Removes the rows of earlier months than this one."""
    await session.execute(delete(MonthlySpendRow).where(MonthlySpendRow.month < month))


async def erase_spend(session: WriteSession, tenant_id: TenantId) -> None:
    """Removes the rows of a tenant, its keys and its end users."""
    await session.execute(delete(MonthlySpendRow).where(MonthlySpendRow.tenant_id == tenant_id))


@cache
def _adding(dialect: str) -> Executable:
    """Returns the statement that adds one request to the rows of owners.

    The rows are parameters: SQLAlchemy compiles a statement with several rows in it anew each time.
    """
    added = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(_TABLE)  # type: ignore[arg-type]
    return added.on_conflict_do_update(
        index_elements=["owner_id", "month", "currency", "shard"],
        set_={name: _TABLE.c[name] + added.excluded[name] for name in _SUMS},
    )
