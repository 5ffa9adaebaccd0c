"""Reads from the usage ledger what tests expect to be billed."""

from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.meter import UsageMeter


async def billed_tokens(meter: UsageMeter, tenant_id: TenantId) -> int:
    """The tokens of all rows of a tenant."""
    return sum(one.used.total_tokens for one in await meter.summarise(tenant_id, 0.0, 1e12))
