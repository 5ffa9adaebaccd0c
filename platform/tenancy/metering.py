"""Records the usage of every request in the usage ledger: a table with one row for each request.

A row is added once and never deleted, not even when its tenant is deleted. It changes only when its tenant is erased:
then its adapter loses its name. This module knows no prices.
Invariant: if the same request id is recorded twice, the second call changes nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import RequestId, TenantId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenants import UsageEvent, UsageGroup, UsageOutcome, UsageSummary
from graftwork.platform.tenancy.usage_journal import JournalEntry, UsageJournal

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
    """Stores usage records in the ledger. If the database cannot store a record now, keeps the record for later.

    Records that wait, and those of running requests, are in the journal too: if the process dies, the next one of the
    same data folder stores them (see `recover`). Call `flush` every second, and once more before the process ends.
    """

    def __init__(self, meter: UsageMeter, journal: UsageJournal) -> None:
        self.journal = journal
        self._meter = meter
        self._waiting: dict[RequestId, _Waiting] = {}
        """By request, oldest first."""
        self._error: Unavailable | None = None
        """Why the oldest waiting row is not stored."""

    def check(self) -> None:
        """Raises Unavailable if a usage record is in memory because the database could not store it."""
        if self._error is not None and self._waiting:
            raise self._error

    async def record(self, event: UsageEvent, on_stored: Callable[[], None], entry: JournalEntry | None = None) -> None:
        """Stores the usage record of a request. If the database does not answer, keeps the record for `flush`.

        If a record of the same request exists already, changes nothing. Calls `on_stored` once the record is stored,
        but not if the request had a record before. Ends `entry`, the request's entry in the journal, once the record is
        stored.
        """
        self._waiting.setdefault(event.request_id, _Waiting(event, on_stored, entry))
        await self._store(event.request_id)

    async def recover(self) -> int:
        """Stores the records of requests that ran when another process of the same data folder died. Returns how many
        there were.
        """
        num_found = 0
        for events in self.journal.recover():
            for event in events:
                await self.record(event, lambda: None)
            num_found += len(events)
        if num_found:
            _log.warning("usage_recovered", extra={"requests": num_found})
        return num_found

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
        try:
            is_new = await self._meter.record(waiting.event)
        except Unavailable as error:
            _log.warning("usage_waits", extra={"request_id": request_id, "waiting": len(self._waiting)})
            self._error = error
            waiting.keep(self.journal)
            return False
        if self._waiting.pop(request_id, None) is not None and waiting.entry is not None:
            waiting.entry.end()
        if is_new:
            waiting.on_stored()
        return True


@dataclass
class _Waiting:
    """A usage record that is not stored yet."""

    event: UsageEvent
    on_stored: Callable[[], None]
    entry: JournalEntry | None
    is_kept: bool = False
    """Whether the journal has the record as it is here."""

    def keep(self, journal: UsageJournal) -> None:
        """Writes the record to the journal, unless it is there, or the journal's disk is full too."""
        if self.is_kept:
            return
        try:
            if self.entry is None:
                self.entry = journal.begin(self.event)
            else:
                self.entry.replace(self.event)
        except Unavailable as error:
            _log.warning("usage_not_journaled", extra={"request_id": self.event.request_id, "error": error.message})
            return
        self.is_kept = True
