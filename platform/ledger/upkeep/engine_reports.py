"""Keeps what each engine has reported about each request, apart from the ledger, so that the two can be compared.

    begin ──► a slot of a file ──► admit, add: at each event, as it comes ──► end ──► flush: the database
                                                                              └ the process dies ──► recover: the same

Owns the reports of this gateway that are not in the database. Never bills anything. What is billed goes another way:
through the answer, the account of the request, and the journal or the stored events of a turn.
Invariant: a report is in the database once, however often it is stored.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from graftwork.platform.ledger.slot_files import COUNTS, SlotEntry, SlotFiles
from graftwork.platform.ledger.upkeep import agreement_rows

_log = logging.getLogger(__name__)

KEPT_S = 35 * 86_400.0
"""How long reports are kept: a month, and some days to look at it."""
_FLUSHED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine has reported about one request that it ran."""

    id: str
    request_id: str
    """The request that the ledger knows."""
    choice: int
    """The number of the answer, from 0."""
    domain: str
    """The isolation domain of the tenant, in hexadecimal."""
    is_whole: bool = False
    """Whether the gateway was alive at the end."""
    at: float = 0.0
    """When the engine's work ended, or was found to have ended, in Unix seconds."""
    counts: tuple[int, ...] = ()
    """In the order of `COUNTS`."""


class SentRequest(Protocol):
    """What a report needs to know of a request to an engine."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def domain(self) -> IsolationDomain: ...


class EngineReports:
    """The reports of one gateway process. Not thread-safe. Call `flush` every second."""

    def __init__(self, folder: Path, database: Database, clock: Clock) -> None:
        """Creates the folder if it is missing."""
        self._files = SlotFiles(folder, _decode)
        self._database = database
        self._clock = clock
        self._ended: list[OpenReport] = []

    def begin(self, request: SentRequest) -> "OpenReport":
        """Begins the report of a request. Raises Unavailable if the disk is full or cannot be written."""
        request_id, choice = ledger_request(request.request_id)
        report = EngineReport(new_id("rep"), request_id, choice, request.domain.hex())
        text = json.dumps([report.id, request_id, choice, report.domain]).encode()
        return OpenReport(SlotEntry(*self._files.take(text, [0] * len(COUNTS))), report, self)

    def note_end(self, report: "OpenReport") -> None:
        """Takes a report that has ended, for the next flush. Drops one of a request that the engine never began."""
        if report.entry.counts()[0]:
            report.ended_at = self._clock.now()
            self._ended.append(report)
        else:
            report.entry.end()

    async def flush(self) -> int:
        """Stores the reports that have ended. Returns how many remain, which is none unless the database fails.

        Raises Unavailable if the database does not answer; the reports are kept.
        """
        while self._ended:
            part = self._ended[:_FLUSHED_AT_ONCE]
            await self._store([one.whole() for one in part])
            del self._ended[: len(part)]
            for one in part:
                one.entry.end()
        return len(self._ended)

    async def recover(self) -> int:
        """Stores the reports of processes of the same data folder that died. Returns how many there were."""
        num_found, now = 0, self._clock.now()
        for reports in self._files.recover():
            await self._store([replace(one, at=now) for one in reports])
            num_found += len(reports)
        return num_found

    async def drop_old(self) -> None:
        """Deletes reports that are older than `KEPT_S`."""
        async with self._database.write() as session:
            await agreement_rows.drop_reports(session, self._clock.now() - KEPT_S)

    async def close(self) -> None:
        """Stores the reports that have ended, and closes the files.

        If the database does not answer, the next process of the same data folder stores them.
        """
        try:
            await self.flush()
        except Unavailable as error:
            _log.warning("engine_reports_kept", extra={"reports": len(self._ended), "reason": error.message})
        self._files.close()

    async def _store(self, reports: Sequence[EngineReport]) -> None:
        rows = [
            {
                "id": one.id,
                "request_id": one.request_id,
                "choice": one.choice,
                "domain": one.domain,
                "at": one.at,
                "is_whole": one.is_whole,
                **dict(zip(COUNTS, one.counts, strict=True)),
            }
            for one in reports
        ]
        if rows:
            await self._database.write_whole(partial(agreement_rows.add_reports, rows=rows))


class OpenReport:
    """The report of a request that an engine works on."""

    __slots__ = ("_owner", "_report", "add", "add_adapters", "admit", "ended_at", "entry")

    def __init__(self, entry: SlotEntry, report: EngineReport, owner: EngineReports) -> None:
        self.entry = entry
        self.admit = entry.admit
        self.add = entry.add
        self.add_adapters = entry.add_adapters
        self.ended_at: float | None = None
        self._report = report
        self._owner = owner

    def end(self) -> None:
        """Ends the report. A second call changes nothing."""
        if self.ended_at is None:
            self.ended_at = 0.0
            self._owner.note_end(self)

    def whole(self) -> EngineReport:
        """Returns the report with its counts, after its end."""
        return replace(self._report, is_whole=True, at=self.ended_at or 0.0, counts=self.entry.counts())


def ledger_request(request_id: RequestId) -> tuple[str, int]:
    """Returns the request that the ledger knows, and the number of its answer, from the id of a request to an engine.

    Each answer of an inference request goes to the engine as `REQUEST.NUMBER`; a turn goes as itself.
    """
    whole, separator, number = request_id.rpartition(".")
    return (whole, int(number)) if separator and number.isdecimal() else (request_id, 0)


def _decode(text: bytes, counts: Sequence[int]) -> EngineReport:
    report_id, request_id, choice, domain = json.loads(text)
    return EngineReport(report_id, request_id, choice, domain, counts=tuple(counts))
