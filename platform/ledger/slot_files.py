"""Keeps records with running counts in files, so that they outlive a process that is killed.

Owns the files of one folder: one for each process that uses the folder, locked while the process lives. The files are
mapped into memory, so a counter costs no system call, and the kernel keeps it when the process dies. It does not outlive
the machine. Never knows what a record says.
"""

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import new_id

_log = logging.getLogger(__name__)

Record = TypeVar("Record")

_SUFFIX = ".journal"
_UNREADABLE = ".unreadable"
_UNLOCKED = ".new"
_SLOT_BYTES = 8192
_SLOTS = 256
"""Slots of one file: 2 MiB. A process that runs more requests at once makes more files."""
_WORD: Final = "q"
"""The format of one number of a slot's header: 8 bytes, written at once."""
COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "host_tokens",
    "disk_tokens",
    "kv_byte_seconds",
    "adapter_bytes",
    "engine_us",
)
"""The counts of a slot."""
_HEADER = struct.Struct((1 + len(COUNTS)) * _WORD)
"""A slot's header: the length of its record in bytes (0 in a free slot) with `_FORM`, and then its counts."""
_FORM = 2 << 32
"""Bits of the length, which say how many counts the header has."""
_HEADERS = {0: struct.Struct(4 * _WORD), 1 << 32: struct.Struct(8 * _WORD), _FORM: _HEADER}
"""By these bits: the headers that earlier versions wrote, with the first counts only, and the present one."""
_LENGTH = (1 << 32) - 1
"""The other bits of the length."""


class SlotEntry:
    """One record in a slot, with its counts: what a request has used of its engine so far."""

    __slots__ = ("_at", "_file", "_prompt_at", "_words")

    def __init__(self, file: "SlotFile", at: int) -> None:
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

    def add(self, completion_tokens: int, kv_byte_seconds: int = 0, engine_us: int = 0) -> None:
        """Adds tokens of the answer, KV that was held, and time of the engine. Call it before the tokens are delivered."""
        self._words[self._prompt_at + 2] += completion_tokens
        self._words[self._prompt_at + 5] += kv_byte_seconds
        self._words[self._prompt_at + 7] += engine_us

    def add_adapters(self, adapter_bytes: int) -> None:
        """Adds bytes of adapters that the engine has loaded for the request."""
        self._words[self._prompt_at + 6] += adapter_bytes

    def counts(self) -> tuple[int, ...]:
        """Returns the counts, in the order of `COUNTS`."""
        return tuple(self._words[self._prompt_at : self._prompt_at + len(COUNTS)])

    def rewrite(self, text: bytes, counts: Sequence[int]) -> None:
        """Replaces the record and its counts."""
        self._file.write(self._at, text, counts)

    def end(self) -> None:
        """Frees the slot. Call it once, when the record is stored elsewhere or not needed."""
        self._file.free(self._at)


class SlotFiles(Generic[Record]):
    """The files of one process in one folder. Not thread-safe."""

    def __init__(self, folder: Path, decode: Callable[[bytes, Sequence[int]], Record]) -> None:
        """Creates the folder if it is missing. The first file is made for the first record. `decode` makes a record from
        its text and its counts; it raises ValueError, TypeError or KeyError if they cannot be read.
        """
        self._folder = folder
        self._decode = decode
        self._files: list[SlotFile] = []

    @property
    def num_records(self) -> int:
        """How many records this process has."""
        return sum(file.num_taken for file in self._files)

    def take(self, text: bytes, counts: Sequence[int]) -> "tuple[SlotFile, int]":
        """Takes a slot for a record. Returns its file and the offset of its first byte.

        Raises Unavailable if the disk is full or cannot be written.
        """
        file = next((file for file in self._files if file.has_room), None)
        if file is None:
            file = self._new_file()
        at = file.take()
        file.write(at, text, counts)
        return file, at

    def recover(self) -> Iterator[list[Record]]:
        """Yields the records of each process that died, of requests that had reached the engine.

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
                records, errors = self._read(path.read_bytes())
                yield records
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

    def _new_file(self) -> "SlotFile":
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = SlotFile(self._folder / f"{new_id('usage')}{_SUFFIX}")
        except OSError as error:
            raise Unavailable(
                f"The usage of requests cannot be recorded in {self._folder} ({error.strerror}): the operator must free "
                "disk space, or make the folder writable.",
                code="storage_full",
                retry_after_s=5.0,
            ) from error
        self._files.append(file)
        return file

    def _read(self, content: bytes) -> tuple[list[Record], list[str]]:
        """Returns the records of the requests that had reached the engine, and what is wrong with the others."""
        records: list[Record] = []
        errors: list[str] = []
        for at in range(0, len(content) - _SLOT_BYTES + 1, _SLOT_BYTES):
            (length,) = struct.unpack_from(_WORD, content, at)
            try:
                header = _HEADERS[length & ~_LENGTH]
                _, *counts = header.unpack_from(content, at)
                if length and counts[0]:
                    start = at + header.size
                    records.append(self._decode(content[start : start + (length & _LENGTH)], counts))
            except (ValueError, TypeError, KeyError) as error:
                errors.append(f"slot at {at}: {error}")
        return records, errors


class SlotFile:
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

    @property
    def num_taken(self) -> int:
        return _SLOTS - len(self._free)

    def take(self) -> int:
        """Takes a free slot. Returns the offset of its first byte."""
        return self._free.pop()

    def write(self, at: int, text: bytes, counts: Sequence[int]) -> None:
        """Writes a record into a slot. Its length is written last, so that a process that dies leaves all or nothing."""
        _HEADER.pack_into(self.memory, at, 0, *counts)
        start = at + _HEADER.size
        self.memory[start : start + len(text)] = text
        _HEADER.pack_into(self.memory, at, len(text) | _FORM, *counts)

    def free(self, at: int) -> None:
        _HEADER.pack_into(self.memory, at, *[0] * (1 + len(COUNTS)))
        self._free.append(at)

    def close(self) -> None:
        is_empty = self.num_taken == 0
        self.words.release()
        self.memory.close()
        if is_empty:
            self.path.unlink()
        os.close(self._descriptor)


def _is_locked(descriptor: int) -> bool:
    """Returns whether a living process has locked the file. Otherwise, the lock is then the caller's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
