"""Stores usage records in the ledger, now or when the database answers again.

    begin ──► a slot of the journal, with the parts of the usage record that are known at the start
    admit, add ──► the slot's counters, at each delivery, so that a gateway that is killed has billed what it delivered
    record ──► the ledger's row; then the slot is free

Owns the records that wait in memory; each of them is in the journal too.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.ledger.journal import JournalEntry, UsageJournal
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.prices.price_list import PriceBook

_log = logging.getLogger(__name__)


class UsageBacklog:
    """Stores usage records in the ledger. If the database cannot store a record now, keeps the record for later.

    Records that wait, and those of running requests, are in the journal too: if the process dies, the next one of the
    same data folder stores them (see `recover`). Call `flush` every second, and once more before the process ends.
    """

    def __init__(self, meter: UsageMeter, journal: UsageJournal, book: PriceBook | None = None) -> None:
        """`book` has the prices of requests that another process has left; None if they have none."""
        self.journal = journal
        self._book = book or PriceBook()
        self._meter = meter
        self._waiting: dict[RequestId, _Waiting] = {}
        """By request, oldest first."""
        self._error: Unavailable | None = None
        """Why the oldest waiting row is not stored."""

    @property
    def num_waiting(self) -> int:
        """How many requests have ended whose records the database has not stored."""
        return len(self._waiting)

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
                await self.record(event.priced(self._book.find(event.price_id)), lambda: None)
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
