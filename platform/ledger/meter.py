"""Writes and reads the usage ledger.

Owns the ledger's rows. A row is added once, and stays when its tenant is deleted. It changes only when its tenant is
erased: then its adapter loses its name. Rows are deleted when `rollups.py` prunes them, if the operator wants that, and
after the days for which a tenant's usage is kept.
Invariant: if the same request id is recorded twice, the second call changes nothing.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from graftwork.platform.database import Database
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.ledger import repository
from graftwork.platform.ledger.report_rows import sum_sessions, sum_usage
from graftwork.platform.ledger.rollup_rows import DAY_S, delete_sums, erase_names_in_sums, hold_rollup
from graftwork.platform.ledger.spend_rows import drop_spend_before, erase_spend, find_spent
from graftwork.platform.ledger.usage import UsageEvent, UsageGroup, UsageKey, UsageSummary
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.quota import month_of
from graftwork.platform.tenancy.principals import TenantScope

_ERASED_PER_TRANSACTION = 1_000
_KEPT_S = 40 * 86_400.0
"""How long what was used in a month is kept: the present month, and the one before it."""


class UsageMeter:
    """Writes and reads the usage ledger, the table with the usage of every request. Implements `SpendLedger` for
    monthly limits.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._write_all: Callable[[], Awaitable[object]] | None = None

    def read_after(self, write_all: Callable[[], Awaitable[object]]) -> None:
        """Awaits `write_all` before each reading from now on: it stores the records that wait in this process, so that what
        is read has them.
        """
        self._write_all = write_all

    async def write_waiting(self) -> None:
        """Stores the records that wait in this process. The readings here do so themselves."""
        if self._write_all is not None:
            await self._write_all()

    async def record(self, event: UsageEvent) -> bool:
        """Adds the usage of one request to the ledger.

        Returns True. If the request was recorded before, changes nothing and returns False.
        """
        return bool(await self.record_all([event]))

    async def record_all(self, events: Sequence[UsageEvent]) -> set[UsageKey]:
        """Adds the usage of several requests to the ledger in one transaction: all of them, or none.

        Returns the requests that were not recorded before.
        """
        return await self._database.write_whole(partial(repository.add_usages, events=events))

    async def has_recorded(self, tenant_id: TenantId, request_id: str) -> bool:
        """Returns whether the ledger has the usage of this request of a tenant."""
        await self.write_waiting()
        async with self._database.read() as session:
            return await repository.has_usage(session, tenant_id, request_id)

    async def summarise(
        self, tenant_id: TenantId | None, start: float, end: float, group_by: UsageGroup = UsageGroup.DAY
    ) -> list[UsageSummary]:
        """Returns the total usage of each group of requests that were recorded in the time [start, end).

        Times are in seconds since the Unix epoch. `group_by` decides how requests are grouped, such as by day. The
        result is sorted by group, with the group None last. If `tenant_id` is None, the requests of all tenants count.
        """
        await self.write_waiting()
        async with self._database.read() as session:
            summaries = await sum_usage(session, tenant_id, start, end, group_by)
        return sorted(summaries, key=lambda summary: (summary.group is None, summary.group or ""))

    async def of_sessions(
        self, tenant_id: TenantId, session_ids: Collection[SessionId]
    ) -> dict[SessionId, UsageSummary]:
        """Returns all usage of each of these sessions. A session without usage is left out."""
        if not session_ids:
            return {}
        await self.write_waiting()
        async with self._database.read() as session:
            return await sum_sessions(session, tenant_id, session_ids)

    async def spent(self, owner_ids: Sequence[str], month: str) -> Mapping[str, Spent]:
        """Returns what owners of limits have used in a month such as `2026-11`; owners without use are left out."""
        await self.write_waiting()
        return await self._database.read_few(partial(find_spent, owner_ids=owner_ids, month=month))

    async def drop_old_months(self, now: float) -> None:
        """Removes what owners had used in months before the last one. The ledger keeps the requests themselves."""
        async with self._database.write() as session:
            await drop_spend_before(session, month_of(now - _KEPT_S))

    async def delete_older(self, scope: TenantScope, before: float) -> int:
        """Deletes the usage of a tenant from before the day in UTC of a time in Unix seconds: rows, and their sums. Returns
        how many. What its limits know of this month stays.

        Only whole days go, so that reports from rows and from sums agree.
        """
        before = int(before) // DAY_S * DAY_S
        num_deleted, num_rows = 0, _ERASED_PER_TRANSACTION
        while num_rows == _ERASED_PER_TRANSACTION:
            async with self._database.write() as session:
                num_rows = await repository.delete_older(session, scope, before, _ERASED_PER_TRANSACTION)
            num_deleted += num_rows
        async with self._database.write() as session:
            await hold_rollup(session, waits=True)  # no row that is gone gets into the sums later
            return num_deleted + await delete_sums(session, scope, before)

    async def erase(self, scope: TenantScope) -> bool:
        """Erases the names of a deleted tenant's adapters, and what it and its end users have used this month. The records
        stay without them. Returns True.
        """
        async with self._database.write() as session:
            await erase_spend(session, scope)
        num_rows = _ERASED_PER_TRANSACTION
        while num_rows == _ERASED_PER_TRANSACTION:
            async with self._database.write() as session:
                num_rows = await repository.erase_adapter_names(session, scope, _ERASED_PER_TRANSACTION)
        async with self._database.write() as session:
            await hold_rollup(session, waits=True)  # what is rolled up from now on has no names
            await erase_names_in_sums(session, scope)
        return True
