"""Stores usage records in the ledger, several in one transaction, now or when the database answers again.

    begin ──► a slot of the journal, with the parts of the usage record that are known at the start
    admit, add ──► the slot's counters, at each delivery, so that a gateway that is killed has billed what it delivered
    record ──► the slot has the whole record, which waits in memory for others
    flush ──► the ledger's rows, all that wait in one transaction; then the slots are free

A transaction costs a gateway more than the row in it, so a group of rows costs little more than one of them.
Owns the records that wait in memory; each of them is in the journal too.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftwork.platform.errors import Unavailable
from graftwork.platform.ledger.journal import JournalEntry, UsageJournal
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent, UsageKey
from graftwork.platform.prices.price_list import PriceBook

_log = logging.getLogger(__name__)


_GATHERED_S = 0.05
"""How long a record waits for others. `UsageMeter.read_after` lets those who read in this process see it at once."""
_LARGEST_GROUP = 200
"""The most records of one transaction: PostgreSQL takes 32,767 values in a statement."""


class UsageBacklog:
    """Stores usage records in the ledger, in groups. If the database cannot store them now, keeps them for later.

    Records that wait, and those of running requests, are in the journal too: if the process dies, the next one of the
    same data folder stores them (see `recover`). Call `flush` every second, and once more before the process ends.
    """

    def __init__(self, meter: UsageMeter, journal: UsageJournal, book: PriceBook | None = None) -> None:
        """`meter` stores what waits before it reads. `book` has the prices of requests that another process has left; None
        if they have none.
        """
        self.journal = journal
        self._book = book or PriceBook()
        self._meter = meter
        meter.read_after(self.flush)
        self._waiting: dict[UsageKey, _Waiting] = {}
        """By request, oldest first."""
        self._error: Unavailable | None = None
        """Why the oldest waiting row is not stored."""
        self._storing = asyncio.Lock()
        self._group: asyncio.Task[None] | None = None
        """Gathers records, and stores them. None if none wait, or the database does not answer."""

    @property
    def num_waiting(self) -> int:
        """How many requests have ended whose records the database has not stored."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises Unavailable if a usage record is in memory because the database could not store it."""
        if self._error is not None:
            raise self._error

    def record(self, event: UsageEvent, on_stored: Callable[[], None], entry: JournalEntry | None = None) -> None:
        """Keeps the usage record of a request, and stores it soon. If the database does not answer then, `flush` does.

        If a record of the same request exists already, changes nothing. Calls `on_stored` once the record is stored,
        but not if the request had a record before. Ends `entry`, the request's entry in the journal, once the record is
        stored. Call it in an event loop.
        """
        waiting = self._waiting.setdefault(event.key, _Waiting(event, on_stored, entry))
        waiting.keep(self.journal)
        if self._group is None and self._error is None:
            self._group = asyncio.create_task(self._gather(), name="storing usage rows")

    async def recover(self) -> int:
        """Stores the records of requests that ran when another process of the same data folder died. Returns how many
        there were.
        """
        num_found = 0
        for events in self.journal.recover():
            for event in events:
                self.record(event.priced(self._book.find(event.price_id)), lambda: None)
            await self.flush()
            num_found += len(events)
        if num_found:
            _log.warning("usage_recovered", extra={"requests": num_found})
        return num_found

    async def flush(self) -> int:
        """Tries to store the usage records in memory, oldest first, until the database fails. Returns how many remain.

        Waits for a group that is being stored.
        """
        async with self._storing:
            while group := list(self._waiting.values())[:_LARGEST_GROUP]:
                try:
                    await self._store(group)
                except Unavailable as error:
                    _log.warning("usage_waits", extra={"waiting": len(self._waiting), "error": error.message})
                    self._error = error
                    return len(self._waiting)
            self._error = None
        return len(self._waiting)

    async def _gather(self) -> None:
        """Stores what waits, each time after a while, until nothing waits."""
        try:
            while self._waiting and self._error is None:
                await asyncio.sleep(_GATHERED_S)
                await self.flush()
        finally:
            self._group = None

    async def _store(self, group: "Sequence[_Waiting]") -> None:
        """Stores a group of records. Those that the database refuses for what they are stay in the journal alone.

        Raises Unavailable if the database does not answer.
        """
        try:
            new = await self._meter.record_all([one.event for one in group])
        except Unavailable:
            raise
        except Exception:  # noqa: BLE001  such a record must not keep the others from being stored
            if len(group) > 1:
                for one in group:
                    await self._store([one])
                return
            (refused,) = group
            _log.exception("usage_not_stored", extra={"request_id": refused.event.request_id})
            del self._waiting[refused.event.key]
            return
        for one in group:
            del self._waiting[one.event.key]
            if one.entry is not None:
                one.entry.end()
            if one.event.key in new:
                one.on_stored()


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
