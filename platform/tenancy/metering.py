"""Records the usage of every request in the usage ledger: a table with one row for each request.

A row is added once and never changed or deleted, not even when its tenant is deleted. This module knows no prices.
Invariant: if the same request id is recorded twice, the second call changes nothing.
"""

import logging
from collections.abc import Callable

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import RequestId, TenantId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenants import UsageEvent, UsageGroup, UsageOutcome, UsageSummary

__all__ = ["UsageBacklog", "UsageEvent", "UsageGroup", "UsageMeter", "UsageOutcome", "UsageSummary"]

_log = logging.getLogger(__name__)


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


class UsageBacklog:
    """Stores usage records in the ledger. If the database cannot store a record now, keeps the record in memory.

    Call `flush` every second, and once more before the process ends. Records that are still in memory then are lost.
    """

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter
        self._waiting: dict[RequestId, tuple[UsageEvent, Callable[[], None]]] = {}
        """By request, oldest first: the row, and the function to call once it is stored."""
        self._error: Unavailable | None = None
        """Why the oldest waiting row is not stored."""

    def check(self) -> None:
        """Raises Unavailable if a usage record is in memory because the database could not store it."""
        if self._error is not None and self._waiting:
            raise self._error

    async def record(self, event: UsageEvent, on_stored: Callable[[], None]) -> None:
        """Stores the usage record of a request. If the database does not answer, keeps the record in memory for
        `flush`.

        If a record of the same request exists already, changes nothing. Calls `on_stored` once the record is stored,
        but not if the request had a record before.
        """
        self._waiting.setdefault(event.request_id, (event, on_stored))
        await self._store(event.request_id)

    async def flush(self) -> int:
        """Tries to store the usage records in memory, oldest first, until one fails. Returns how many remain in memory."""
        for request_id in tuple(self._waiting):
            if not await self._store(request_id):
                break
        return len(self._waiting)

    async def _store(self, request_id: RequestId) -> bool:
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return True  # another call has stored it meanwhile
        event, on_stored = waiting
        try:
            is_new = await self._meter.record(event)
        except Unavailable as error:
            _log.warning("usage_waits", extra={"request_id": request_id, "waiting": len(self._waiting)})
            self._error = error
            return False
        self._waiting.pop(request_id, None)
        if is_new:
            on_stored()
        return True
