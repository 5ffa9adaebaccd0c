"""What an earlier process left in the disk tier's folder.

One bounded read a file: headers are verified now, pages when they are read.
Files that do not have the tier's names are nobody's business here: counted as foreign and left alone.
"""

import re

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.counters import DiskMonitor
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

_SUFFIX = ".kvpages"
_NAME = re.compile(rf"[0-9a-f]{{64}}-[0-9a-f]{{16}}{re.escape(_SUFFIX)}")


def file_name(last_key: PageKey, stamp: int) -> str:
    """The name of a file by its last page, which by the chain of keys stands for all before it; never given twice."""
    return f"{last_key.hex()}-{stamp:016x}{_SUFFIX}"


def is_our_name(name: str) -> bool:
    """Whether the tier may have made this file, be it whole or not."""
    return _NAME.fullmatch(name.removesuffix(DRAFT_SUFFIX)) is not None


class FolderScan:
    """One look through the folder at start."""

    def __init__(self, files: FaultTolerantFiles, monitor: DiskMonitor, layout: bytes) -> None:
        self._files = files
        self._monitor = monitor
        self._layout = layout

    def page_files(self) -> list[PageFile]:
        """Every file that counts, least recently used first; drafts and damaged files are removed on the way."""
        found = [file for entry in self._files.entries() if (file := self._recognise(entry)) is not None]
        return sorted(found, key=lambda file: (file.used_at_ns, file.name))

    def _recognise(self, entry: FileEntry) -> PageFile | None:
        """None for a file that does not count: a stranger's, or one that was worth nothing and is removed."""
        file = PageFile(entry.name, entry.num_bytes, None, entry.used_at_ns)
        try:
            if not is_our_name(entry.name):
                raise ForeignFile("not one of our names")
            file.header = self._read_header(entry)
        except DamagedFile as error:
            if not entry.name.endswith(DRAFT_SUFFIX):
                self._monitor.record_corrupt(entry.name, str(error))
            return None if self._files.remove(entry.name) else file
        except ForeignFile:
            self._monitor.add("foreign")
        return file if is_our_name(entry.name) else None

    def _read_header(self, entry: FileEntry) -> PageFileHeader | None:
        """None where the disk refuses. Raises DamagedFile, ForeignFile."""
        if entry.name.endswith(DRAFT_SUFFIX):
            raise DamagedFile("never finished")
        start = self._read_start(entry.name, BLOCK_BYTES)
        if start is not None and (num_bytes := promised_header_bytes(start)) > BLOCK_BYTES:
            start = self._read_start(entry.name, num_bytes)
        if start is None:
            return None
        header = decode_header(start)
        if header.file_bytes != entry.num_bytes:
            raise DamagedFile(f"{entry.num_bytes} bytes instead of {header.file_bytes}")
        if header.layout != self._layout:
            raise ForeignFile("another layout")
        return header

    def _read_start(self, name: str, num_bytes: int) -> bytes | None:
        start = bytearray(num_bytes)
        count = self._files.read(name, 0, memoryview(start))
        return bytes(start[:count]) if count is not None else None
