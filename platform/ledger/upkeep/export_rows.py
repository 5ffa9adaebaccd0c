"""Contains the SQL statements that read the rows of the usage ledger for an export, a page at a time.

Each page continues behind the last row by an index, so a page costs the same wherever it is. Never commits.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, tuple_

from graftwork.platform.database import ReadSession
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.prices.tables import PriceListRow

Key = tuple[float, str]
"""The time and the request id of a row."""
COLUMNS = tuple(name for name in UsageRow.__table__.columns.keys() if not name.endswith("_atoms"))  # noqa: SIM118


async def next_tenant(session: ReadSession, after: str) -> TenantId | None:
    """Returns the first tenant with rows behind another one in the order of the ids; None if there is none."""
    later = select(UsageRow.tenant_id).where(UsageRow.tenant_id > after).order_by(UsageRow.tenant_id).limit(1)
    found = await session.scalar(later)
    return None if found is None else TenantId(found)


async def read_page(
    session: ReadSession, tenant_id: TenantId, start: float, end: float, after: Key | None, limit: int
) -> Sequence[dict[str, Any]]:
    """Returns up to `limit` rows of a tenant of the time [start, end) behind `after`, in the order of their times.

    Each has all of `COLUMNS`, the cost in atoms (10⁻¹² of the currency), and the currency.
    """
    columns = [*(getattr(UsageRow, name) for name in COLUMNS), UsageRow.cost_atoms, PriceListRow.currency]
    page = select(*columns).outerjoin(PriceListRow, PriceListRow.id == UsageRow.price_id)
    page = page.where(UsageRow.tenant_id == tenant_id, UsageRow.at >= start, UsageRow.at < end)
    if after is not None:
        page = page.where(UsageRow.at >= after[0], tuple_(UsageRow.at, UsageRow.request_id) > after)
    rows = await session.execute(page.order_by(UsageRow.at, UsageRow.request_id).limit(limit))
    return [dict(row) for row in rows.mappings()]
