"""Records the usage of every request: in a journal file while the request runs, and then in the usage ledger, a table.

    begin ──► a slot in the file, with the parts of the usage record that are known at the start
    admit, add ──► the slot's counters, at each delivery, so that a gateway that is killed has billed what it delivered
    record ──► the ledger's row; then the slot is free

Owns the ledger's rows. A row is added once and never deleted, not even when its tenant is deleted. It changes only when
its tenant is erased: then its adapter loses its name. Also owns the journal's files in one folder: one for each gateway
process that uses the folder, locked while the process lives. The files are mapped into memory, so a counter costs no
system call, and the kernel keeps it when the process dies. It does not outlive the machine.
Invariant: if the same request id is recorded twice, the second call changes nothing.
"""

import fcntl
import json
import logging
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import RequestId, SessionId, TenantId, new_id
from graftwork.platform.prices.price_list import PriceBook
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenants import UsageEvent, UsageGroup, UsageOutcome, UsageSummary

__all__ = ["UsageBacklog", "UsageEvent", "UsageGroup", "UsageMeter", "UsageOutcome", "UsageSummary"]

_log = logging.getLogger(__name__)

_SUFFIX = ".journal"
_UNREADABLE = ".unreadable"
_UNLOCKED = ".new"
_SLOT_BYTES = 8192
_SLOTS = 256
"""Slots of one file: 2 MiB. A process that runs more requests at once makes more files."""
_WORD: Final = "q"
"""The format of one number of a slot's header: 8 bytes, written at once."""
_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "host_tokens",
    "disk_tokens",
    "kv_byte_seconds",
    "adapter_bytes",
)
_HEADER = struct.Struct((1 + len(_COUNTS)) * _WORD)
"""A slot's header: the length of its record in bytes (0 in a free slot) with `_LONG`, and then its counts."""
_OLD_HEADER = struct.Struct(4 * _WORD)
"""The header that earlier versions wrote: the length without `_LONG`, and the first three counts."""
_LONG = 1 << 32
"""A bit of the length, which says that the header has all counts."""
_RECORDED = tuple(field.name for field in fields(UsageEvent) if field.name not in (*_COUNTS, "cost"))
"""The fields of a slot's record; the counts are in its header, and the cost follows from them."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class JournalEntry:
    """The usage of one running request, in a slot of the journal."""

    __slots__ = ("_at", "_file", "_prompt_at", "_words")

    def __init__(self, file: "_JournalFile", at: int) -> None:
        self._file = file
        self._at = at
        self._words = file.words
        self._prompt_at = at // file.words.itemsize + 1

    def admit(self, prompt_tokens: int, cached_tokens: int, *, host_tokens: int = 0, disk_tokens: int = 0) -> None:
        """Adds the tokens of a prompt that the engine has admitted, and how many of them were cached: on any tier, in
        host memory, and on disk.
        """
        self._words[self._prompt_at] += prompt_tokens
        self._words[self._prompt_at + 1] += cached_tokens
        self._words[self._prompt_at + 3] += host_tokens
        self._words[self._prompt_at + 4] += disk_tokens

    def add(self, completion_tokens: int, kv_byte_seconds: int = 0) -> None:
        """Adds tokens of the answer, and KV that was held. Call it before the tokens are delivered."""
        self._words[self._prompt_at + 2] += completion_tokens
        self._words[self._prompt_at + 5] += kv_byte_seconds

    def add_adapters(self, adapter_bytes: int) -> None:
        """Adds bytes of adapters that the engine has loaded for the request."""
        self._words[self._prompt_at + 6] += adapter_bytes

    def replace(self, event: UsageEvent) -> None:
        """Replaces the whole record, for a request that has ended and whose record the database could not store."""
        self._file.write(self._at, event)

    def end(self) -> None:
        """Frees the slot. Call it once, after the usage record is stored or if there is none."""
        self._file.free(self._at)


class UsageJournal:
    """The usage journal of one gateway process. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it is missing. The first file is made by the first request."""
        self._folder = folder
        self._files: list[_JournalFile] = []

    def begin(self, event: UsageEvent) -> JournalEntry:
        """Takes a slot for a request that starts. `event` has the parts that are known; its token counts are kept too.

        Raises Unavailable if the disk is full or cannot be written.
        """
        file = next((file for file in self._files if file.has_room), None)
        if file is None:
            file = self._new_file()
        at = file.take()
        file.write(at, event)
        return JournalEntry(file, at)

    def recover(self) -> Iterator[list[UsageEvent]]:
        """Yields the records of each process that died, with the outcome `interrupted` unless the request had ended.

        Deletes the file of a process after the caller has handled its records, when it asks for the next ones. A file
        with a record that cannot be read is renamed instead, and logged. If this process dies between the two, the next
        one finds the records again, so the caller must be able to handle a record twice.
        """
        own = {file.path for file in self._files}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path in own:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process has recovered it meanwhile
            try:
                if _is_locked(descriptor) or not os.fstat(descriptor).st_nlink:
                    continue
                events, errors = _read(path.read_bytes())
                yield events
                if errors:
                    _log.error("usage_journal_unreadable", extra={"path": str(path), "errors": errors})
                    path.rename(path.with_suffix(_UNREADABLE))
                else:
                    path.unlink()
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Closes the files. Deletes those without a record; the others are for the next process to recover."""
        for file in self._files:
            file.close()
        self._files.clear()

    def _new_file(self) -> "_JournalFile":
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = _JournalFile(self._folder / f"{new_id('usage')}{_SUFFIX}")
        except OSError as error:
            raise Unavailable(
                f"The usage of requests cannot be recorded in {self._folder} ({error.strerror}): the operator must free "
                "disk space, or make the folder writable.",
                code="storage_full",
                retry_after_s=5.0,
            ) from error
        self._files.append(file)
        return file


class _JournalFile:
    """One file of slots, mapped into memory and locked."""

    def __init__(self, path: Path) -> None:
        """Reserves the disk space of all slots, because a write to mapped memory cannot report a full disk.

        The file gets its name after its lock. Otherwise another process could take it for one of a process that died.
        """
        self.path = path
        unnamed = path.with_suffix(_UNLOCKED)
        self._descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(self._descriptor, 0, _SLOTS * _SLOT_BYTES)
            self.memory = mmap.mmap(self._descriptor, _SLOTS * _SLOT_BYTES)
            unnamed.rename(path)
        except OSError:
            unnamed.unlink()
            os.close(self._descriptor)
            raise
        self.words = memoryview(self.memory).cast("B").cast(_WORD)
        """The whole file as numbers. Slots are aligned, so each number of a header is one item."""
        self._free = [slot * _SLOT_BYTES for slot in reversed(range(_SLOTS))]

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        """Takes a free slot. Returns the offset of its first byte."""
        return self._free.pop()

    def write(self, at: int, event: UsageEvent) -> None:
        """Writes a record into a slot. Its length is written last, so that a process that dies leaves all or nothing."""
        counts = [getattr(event, name) for name in _COUNTS]
        text = _encode({name: getattr(event, name) for name in _RECORDED}).encode()
        _HEADER.pack_into(self.memory, at, 0, *counts)
        start = at + _HEADER.size
        self.memory[start : start + len(text)] = text
        _HEADER.pack_into(self.memory, at, len(text) | _LONG, *counts)

    def free(self, at: int) -> None:
        _HEADER.pack_into(self.memory, at, *[0] * (1 + len(_COUNTS)))
        self._free.append(at)

    def close(self) -> None:
        is_empty = len(self._free) == _SLOTS
        self.words.release()
        self.memory.close()
        if is_empty:
            self.path.unlink()
        os.close(self._descriptor)


def _read(content: bytes) -> tuple[list[UsageEvent], list[str]]:
    """Returns the records of the requests that had reached the engine, and what is wrong with the others."""
    events: list[UsageEvent] = []
    errors: list[str] = []
    for at in range(0, len(content) - _SLOT_BYTES + 1, _SLOT_BYTES):
        header = _HEADER if _HEADER.unpack_from(content, at)[0] & _LONG else _OLD_HEADER
        length, *counts = header.unpack_from(content, at)
        if length and counts[0]:
            start = at + header.size
            try:
                events.append(_event(content[start : start + (length & ~_LONG)], counts))
            except (ValueError, TypeError, KeyError) as error:
                errors.append(f"slot at {at}: {error}")
    return events, errors


def _event(text: bytes, counts: Sequence[int]) -> UsageEvent:
    fields = json.loads(text) | dict(zip(_COUNTS, counts, strict=False))  # an old header has fewer
    fields["outcome"] = UsageOutcome(fields["outcome"])
    return UsageEvent(**fields)


def _is_locked(descriptor: int) -> bool:
    """Returns whether a living process has locked the file. Otherwise, the lock is then the caller's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


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

    async def has_recorded(self, tenant_id: TenantId, request_id: str) -> bool:
        """Returns whether the ledger has the usage of this request of a tenant."""
        async with self._database.read() as session:
            return await repository.has_usage(session, tenant_id, request_id)

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

    async def of_sessions(
        self, tenant_id: TenantId, session_ids: Collection[SessionId]
    ) -> dict[SessionId, UsageSummary]:
        """Returns all usage of each of these sessions. A session without usage is left out."""
        if not session_ids:
            return {}
        async with self._database.read() as session:
            return await repository.sum_sessions(session, tenant_id, session_ids)

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

    def __init__(self, meter: UsageMeter, journal: UsageJournal, book: PriceBook | None = None) -> None:
        """`book` has the prices of requests that another process has left; None if they have none."""
        self.journal = journal
        self._book = book or PriceBook()
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
