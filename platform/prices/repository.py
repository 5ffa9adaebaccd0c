"""Contains the SQL statements over price lists. Never commits: the caller that opened the session does."""

from collections.abc import Collection

from sqlalchemy import func, select

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.prices.rates import Rates
from graftwork.platform.prices.tables import PriceListRow

_COUNT = select(func.count()).select_from(PriceListRow)


async def add_price_list(session: WriteSession, prices: PriceList) -> None:
    session.add(
        PriceListRow(
            id=prices.price_id,
            tenant_id=prices.tenant_id,
            service_tier=prices.service_tier,
            currency=prices.currency,
            rates=prices.rates.texts(),
            valid_from=prices.valid_from,
            created_at=prices.created_at,
        )
    )
    await session.flush()


async def count_price_lists(session: ReadSession) -> int:
    """Returns how many price lists there are. Every gateway asks this twice a second, so the statement is built once."""
    return int((await session.execute(_COUNT)).scalar_one())


async def find_price_lists(session: ReadSession, price_ids: Collection[str] | None = None) -> list[PriceList]:
    """Returns all price lists, of all tenants, or those with the given ids."""
    statement = select(PriceListRow).order_by(PriceListRow.id)
    if price_ids is not None:
        statement = statement.where(PriceListRow.id.in_(list(price_ids)))
    return [_price_list(row) for row in await session.scalars(statement)]


def _price_list(row: PriceListRow) -> PriceList:
    return PriceList(
        price_id=row.id,
        tenant_id=None if row.tenant_id is None else TenantId(row.tenant_id),
        service_tier=row.service_tier,
        currency=row.currency,
        rates=Rates.read(row.rates),
        valid_from=row.valid_from,
        created_at=row.created_at,
    )
