"""What an earlier process left in the disk tier's folder.

One bounded read a file: headers are verified now, pages when they are read.
Files that do not have the tier's names are nobody's business here: counted as foreign and left alone.
"""

import re

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.counters import DiskTally
from graftwork.engine.kv.disk.file_format import (
    BLOCK_BYTES,
    DamagedFile,
    ForeignFile,
    PageFileHeader,
    PageRun,
    decode_header,
    promised_header_bytes,
)
from graftwork.engine.kv.disk.files import DRAFT_SUFFIX, CountedFiles, FileEntry

_SUFFIX = ".kvpages"
_NAME = re.compile(rf"[0-9a-f]{{64}}-[0-9a-f]{{16}}{re.escape(_SUFFIX)}")


def file_name(last_key: PageKey, stamp: int) -> str:
    """The name of a run by its last page, which by the chain of keys stands for all before it; never given twice."""
    return f"{last_key.hex()}-{stamp:016x}{_SUFFIX}"


def is_our_name(name: str) -> bool:
    """Whether the tier may have made this file, be it whole or not."""
    return _NAME.fullmatch(name.removesuffix(DRAFT_SUFFIX)) is not None


class FolderScan:
    """One look through the folder at start."""

    def __init__(self, files: CountedFiles, tally: DiskTally, layout: bytes) -> None:
        self._files = files
        self._tally = tally
        self._layout = layout

    def runs(self) -> list[PageRun]:
        """Every file that counts, least recently used first; drafts and damaged files are removed on the way."""
        found = [run for entry in self._files.entries() if (run := self._recognise(entry)) is not None]
        return sorted(found, key=lambda run: (run.used_at_ns, run.name))

    def _recognise(self, entry: FileEntry) -> PageRun | None:
        """None for a file that does not count: a stranger's, or one that was worth nothing and is removed."""
        run = PageRun(entry.name, entry.num_bytes, None, entry.used_at_ns)
        try:
            if not is_our_name(entry.name):
                raise ForeignFile("not one of our names")
            run.header = self._read_header(entry)
        except DamagedFile as error:
            if not entry.name.endswith(DRAFT_SUFFIX):
                self._tally.corrupt(entry.name, str(error))
            return None if self._files.remove(entry.name) else run
        except ForeignFile:
            self._tally.add("foreign")
        return run if is_our_name(entry.name) else None

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
