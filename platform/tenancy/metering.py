"""Records the usage of every request in the usage ledger: a table with one row for each request.

A row is added once and never changed or deleted, not even when its tenant is deleted. This module knows no prices.
Invariant: if the same request id is recorded twice, the second call changes nothing.
"""

from graftwork.platform.database import Database
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenants import UsageEvent, UsageGroup, UsageSummary

__all__ = ["UsageEvent", "UsageGroup", "UsageMeter", "UsageSummary"]


class UsageMeter:
    """Writes and reads the usage ledger, the table with the usage of every request. Implements `TokenLedger` for
    monthly limits.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, event: UsageEvent) -> bool:
        """Adds the usage of one request to the ledger.

        Returns True. If the request was recorded before, changes nothing and returns False.
        """
        async with self._database.write() as session:
            return await repository.add_usage(session, event)

    async def summarise(
        self, tenant_id: TenantId | None, start: float, end: float, group_by: UsageGroup = UsageGroup.DAY
    ) -> list[UsageSummary]:
        """Returns the total usage of each group of requests that were recorded in the time [start, end).

        Times are in seconds since the Unix epoch. `group_by` decides how requests are grouped, such as by day. The
        result is sorted by group, with the group None last. If `tenant_id` is None, the requests of all tenants count.
        """
        async with self._database.read() as session:
            summaries = await repository.sum_usage(session, tenant_id, start, end, group_by)
        return sorted(summaries, key=lambda summary: (summary.group is None, summary.group or ""))

    async def tokens_since(self, tenant_id: TenantId, start: float) -> int:
        """Returns how many prompt and completion tokens the tenant has used in requests that were recorded at `start`
        or later.

        `start` is in seconds since the Unix epoch.
        """
        async with self._database.read() as session:
            return await repository.sum_tokens(session, tenant_id, start)
