"""Records usage in a ledger: one row for each request, added once and never changed.

Owns the record of who used what. Knows no prices and deletes nothing: the rows of a deleted tenant stay.

Invariant: recording a request again, by its id, changes nothing.
"""

import logging
from collections.abc import Callable

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import RequestId, TenantId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenants import UsageEvent, UsageGroup, UsageSummary

__all__ = ["UsageBacklog", "UsageEvent", "UsageGroup", "UsageMeter", "UsageSummary"]

_log = logging.getLogger(__name__)


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


class UsageBacklog:
    """Stores usage rows, and keeps those in memory that the database cannot store at present.

    Call `flush` every second, and once more before the process ends. Rows that are still here are then lost.
    """

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter
        self._waiting: dict[RequestId, tuple[UsageEvent, Callable[[], None]]] = {}
        """By request, oldest first: the row, and the function to call once it is stored."""
        self._error: Unavailable | None = None
        """Why the oldest waiting row is not stored."""

    def check(self) -> None:
        """Raises Unavailable while a row waits."""
        if self._error is not None and self._waiting:
            raise self._error

    async def record(self, event: UsageEvent, on_stored: Callable[[], None]) -> None:
        """Stores a row now, or later if the database does not answer. A request is stored once.

        Calls `on_stored` when this row is stored, but not if the request had a row before.
        """
        self._waiting.setdefault(event.request_id, (event, on_stored))
        await self._store(event.request_id)

    async def flush(self) -> int:
        """Tries to store the waiting rows, until one fails. Returns how many still wait."""
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
