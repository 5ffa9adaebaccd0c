"""Keeps the usage of running requests in files, so that a gateway that is killed has billed what it delivered.

Owns the records of running requests, in slots of `slot_files.py`. They do not outlive the machine.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from graftwork.platform.ledger.slot_files import COUNTS, SlotEntry, SlotFiles
from graftwork.platform.ledger.usage import UsageEvent, UsageOutcome

_RECORDED = tuple(field.name for field in fields(UsageEvent) if field.name not in (*COUNTS, "cost"))
"""The fields of a slot's record; the counts are in its header, and the cost follows from them."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class JournalEntry(SlotEntry):
    """The usage of one running request, in a slot of the journal. Add to it before the tokens are delivered."""

    __slots__ = ()

    def replace(self, event: UsageEvent) -> None:
        """Replaces the whole record, for a request that has ended and whose record the database could not store."""
        self.rewrite(*_slot(event))


class DeliveryCounts(Protocol):
    """Where a running request counts what it has used: a JournalEntry, or nowhere."""

    def admit(self, prompt_tokens: int, cached_tokens: int, *, host_tokens: int = 0, disk_tokens: int = 0) -> None: ...

    def add(self, completion_tokens: int, kv_byte_seconds: int = 0, engine_us: int = 0) -> None: ...

    def add_adapters(self, adapter_bytes: int) -> None: ...


class _NoEntry:
    """Keeps nothing, for a request that is billed only if its answer is stored."""

    def admit(self, prompt_tokens: int, cached_tokens: int, *, host_tokens: int = 0, disk_tokens: int = 0) -> None:
        return None

    def add(self, completion_tokens: int, kv_byte_seconds: int = 0, engine_us: int = 0) -> None:
        return None

    def add_adapters(self, adapter_bytes: int) -> None:
        return None


NO_ENTRY: DeliveryCounts = _NoEntry()


class UsageJournal:
    """The usage journal of one gateway process. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it is missing. The first file is made by the first request."""
        self._files = SlotFiles(folder, _event)

    @property
    def num_open(self) -> int:
        """How many requests have an entry: they run, or the database has not stored their records yet."""
        return self._files.num_records

    def begin(self, event: UsageEvent) -> JournalEntry:
        """Takes a slot for a request that starts. `event` has the parts that are known; its token counts are kept too.

        Raises Unavailable if the disk is full or cannot be written.
        """
        return JournalEntry(*self._files.take(*_slot(event)))

    def recover(self) -> Iterator[list[UsageEvent]]:
        """Yields the records of each process that died, with the outcome `interrupted` unless the request had ended.

        The caller must be able to handle a record twice (see `SlotFiles.recover`).
        """
        return self._files.recover()

    def close(self) -> None:
        """Closes the files. Deletes those without a record; the others are for the next process to recover."""
        self._files.close()


def _slot(event: UsageEvent) -> tuple[bytes, list[int]]:
    """Returns the text and the counts of a record."""
    text = _encode({name: getattr(event, name) for name in _RECORDED}).encode()
    return text, [getattr(event, name) for name in COUNTS]


def _event(text: bytes, counts: Sequence[int]) -> UsageEvent:
    fields = json.loads(text) | dict(zip(COUNTS, counts, strict=False))  # an old header has fewer
    fields["outcome"] = UsageOutcome(fields["outcome"])
    return UsageEvent(**fields)
