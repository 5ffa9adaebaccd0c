"""Records usage in a ledger: one row for each request, added once and never changed.

Owns the record of who used what. Knows no prices and deletes nothing: the rows of a deleted tenant stay.

Invariant: recording a request again, by its id, changes nothing.
"""

from graftwork.platform.database import Database
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenants import UsageEvent, UsageGroup, UsageSummary

__all__ = ["UsageEvent", "UsageGroup", "UsageMeter", "UsageSummary"]


class UsageMeter:
    """Writes and reads the usage ledger. Monthly budgets read it as their `TokenLedger`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, event: UsageEvent) -> bool:
        """Adds one request. Returns False and changes nothing if it was added before."""
        async with self._database.write() as session:
            return await repository.add_usage(session, event)

    async def summarise(
        self, tenant_id: TenantId | None, start: float, end: float, group_by: UsageGroup = UsageGroup.DAY
    ) -> list[UsageSummary]:
        """Returns the usage of each group in the time [start, end), in seconds since the Unix epoch.

        The groups are sorted; the group None is last. If `tenant_id` is None, sums over all tenants.
        """
        async with self._database.read() as session:
            summaries = await repository.sum_usage(session, tenant_id, start, end, group_by)
        return sorted(summaries, key=lambda summary: (summary.group is None, summary.group or ""))

    async def tokens_since(self, tenant_id: TenantId, start: float) -> int:
        """Returns the prompt and completion tokens of the requests that were recorded at `start` or later."""
        async with self._database.read() as session:
            return await repository.sum_tokens(session, tenant_id, start)
