"""Finds the page files that an earlier process left in the disk store's folder.

Reads only the header of each file, which has a limited size. The content of a page is checked later, when the page is
read. Files with other names than the store's are counted as foreign and never changed.
"""

import re
from typing import Protocol

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.file_format import (
    BLOCK_BYTES,
    DamagedFile,
    ForeignFile,
    PageFile,
    PageFileHeader,
    decode_header,
    promised_header_bytes,
)
from graftwork.engine.kv.disk.files import DRAFT_SUFFIX, FaultTolerantFiles, FileEntry
from graftwork.engine.kv.disk.index import DiskMonitor

_SUFFIX = ".kvpages"
_NAME = re.compile(rf"[0-9a-f]{{64}}-[0-9a-f]{{16}}{re.escape(_SUFFIX)}")


def file_name(last_key: PageKey, stamp: int) -> str:
    """Returns a unique name for a new page file. `last_key` is the key of the last page in the file.

    This key depends on all pages before it. `stamp` is the time of writing, in nanoseconds, and differs for each file.
    """
    return f"{last_key.hex()}-{stamp:016x}{_SUFFIX}"


def is_our_name(name: str) -> bool:
    """Returns whether `name` has the form of the store's file names. This includes the names of incomplete files."""
    return _NAME.fullmatch(name.removesuffix(DRAFT_SUFFIX)) is not None


class FileReader(Protocol):
    """Reads files, wherever they are."""

    def read(self, name: str, offset: int, into: memoryview) -> int | None:
        """Reads bytes of a file. Returns how many, or None if they cannot be read now."""
        ...


class FolderScan:
    """Finds the page files in the disk store's folder when the store is opened."""

    def __init__(self, files: FaultTolerantFiles, monitor: DiskMonitor, layout: bytes) -> None:
        self._files = files
        self._monitor = monitor
        self._layout = layout

    def page_files(self) -> list[PageFile]:
        """Returns all files of the store, least recently used first. Removes incomplete and damaged files.

        If the header of a result is None, the file cannot be used but takes room: it has another layout or version, or
        it could not be read or removed.
        """
        found = [file for entry in self._files.entries() if (file := self._read_page_file(entry)) is not None]
        return sorted(found, key=lambda file: (file.used_at_ns, file.name))

    def _read_page_file(self, entry: FileEntry) -> PageFile | None:
        """Returns the record of a file; None if another program made it, or if it was damaged and is now removed."""
        file = PageFile(entry.name, entry.num_bytes, None, entry.used_at_ns)
        try:
            if not is_our_name(entry.name):
                raise ForeignFile("not one of our names")
            file.header = read_header(self._files, entry)
            if file.header is not None and file.header.layout != self._layout:
                file.header = None
                raise ForeignFile("another layout")
        except DamagedFile as error:
            if not entry.name.endswith(DRAFT_SUFFIX):
                self._monitor.record_corrupt(entry.name, str(error))
            return None if self._files.remove(entry.name) else file
        except ForeignFile:
            self._monitor.add("foreign")
        return file if is_our_name(entry.name) else None


def read_header(files: FileReader, entry: FileEntry) -> PageFileHeader | None:
    """Reads and checks the header of a file of any layout. Returns None if the disk cannot be read.

    Raises DamagedFile if the file is incomplete or wrong, or ForeignFile if it has another version.
    """
    if entry.name.endswith(DRAFT_SUFFIX):
        raise DamagedFile("never finished")
    start = _read_start(files, entry.name, BLOCK_BYTES)
    if start is not None and (num_bytes := promised_header_bytes(start)) > BLOCK_BYTES:
        start = _read_start(files, entry.name, num_bytes)
    if start is None:
        return None
    header = decode_header(start)
    if header.file_bytes != entry.num_bytes:
        raise DamagedFile(f"{entry.num_bytes} bytes instead of {header.file_bytes}")
    return header


def _read_start(files: FileReader, name: str, num_bytes: int) -> bytes | None:
    start = bytearray(num_bytes)
    count = files.read(name, 0, memoryview(start))
    return bytes(start[:count]) if count is not None else None
