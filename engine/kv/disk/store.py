"""KV pages on disk: whole files of pages in checksummed files, within a budget of bytes.

DiskStore alone writes, reads and removes files in its folder. It answers a page with the very bytes that were written
under that key or with False, whatever happened to the files in between: a crash at any point, `kill -9`, a full disk, a
flipped bit, files cut off, swapped or removed. It never raises because of what the disk does, and the folder never
holds more than `max_bytes` of pages, not even while a file is being written.

A file appears under its name only when it is whole: it is written under another name, brought to the disk, and
renamed. What was used last survives a restart as each file's time of change.

Writes and removals file one at a time and reads beside them, on worker threads; `holds`, the counts, `forget` and
`forget_domain` touch no file and may be called from any thread at any time. A reader that has opened a file reads it to its end even if it is evicted meanwhile.
"""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.counters import DiskCounters, DiskMonitor
from graftwork.engine.kv.disk.file_format import (
    MAX_PAGES,
    FileSpan,
    PageFile,
    PageFileHeader,
    checksums_of,
    file_bytes,
    page_checksum,
)
from graftwork.engine.kv.disk.files import Buffer, FaultTolerantFiles, FileSystem, LocalFiles
from graftwork.engine.kv.disk.index import DiskIndex
from graftwork.engine.kv.disk.lock import FolderLock
from graftwork.engine.kv.disk.recovery import FolderScan, file_name, is_our_name
from graftwork.platform.clock import Clock, SystemClock

_FILE_BYTES = 64 * 2**20
"""A file of pages is closed at this size: what is evicted at once, and lost at once to a bad sector."""
_FILES_AT_LEAST = 16
"""Files that the budget has room for, where it is small: eviction takes a part of it, not the whole."""
_DIGEST_BYTES = 32


class DiskStore:
    """The disk pages of one engine."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        layout: bytes,
        files: FileSystem | None = None,
        clock: Clock | None = None,
        reserve_share: float = 0.0,
    ) -> None:
        """`layout` is a 32-byte digest of all that decides what a page's bytes mean, their number included.

        `reserve_share` of `max_bytes` is parted equally among the domains that have files, and kept for each.
        """
        assert len(layout) == _DIGEST_BYTES, "a layout is a digest of 32 bytes"
        self._layout = layout
        self._clock = clock or SystemClock()
        self._monitor = DiskMonitor(self._clock)
        self._files = FaultTolerantFiles(files or LocalFiles(folder), self._monitor)
        self._folder_lock = FolderLock(folder)
        self._index = DiskIndex(max_bytes, int(reserve_share * max_bytes))
        self._file_bytes = min(_FILE_BYTES, max_bytes // _FILES_AT_LEAST)
        self._writing = threading.Lock()

    @property
    def bytes_used(self) -> int:
        """Bytes in the folder, with those of a file that is being written."""
        return self._index.bytes_used

    @property
    def num_pages(self) -> int:
        """Pages that `holds` affirms."""
        return self._index.num_pages

    @property
    def counters(self) -> DiskCounters:
        return self._monitor.snapshot()

    def bytes_of(self, domain: bytes) -> int:
        """Bytes of all files that a domain wrote."""
        return self._index.bytes_of(domain)

    def set_limit(self, domain: bytes, num_bytes: int | None) -> None:
        """The most that a domain may have; None lifts it.

        What it has above that goes before anybody else's when room is needed, or with `enforce_limits`.
        """
        self._index.set_limit(domain, num_bytes)

    def set_reserve(self, domain: bytes, num_bytes: int) -> None:
        """What a domain keeps against everyone else's need for room."""
        self._index.set_reserve(domain, num_bytes)

    def open(self, timeout_s: float = 0.0) -> None:
        """Find what an earlier process left; it may take `timeout_s` to go.

        Raises InvalidRequest if the folder is no use or in use.

        Unfinished and damaged files are removed; files of other layouts stay until room is needed, in the order of
        their age; files that do not have our names are left alone and do not count.
        """
        self._folder_lock.acquire(timeout_s)
        for file in FolderScan(self._files, self._monitor, self._layout).page_files():
            self._index.add(file)
        with self._writing:
            self._remove_all(self._index.empty_files())
            self._evict(self._index.victims_for(None, 0, ()) or [])

    def close(self) -> None:
        """Let another process have the folder. What was written stays."""
        self._folder_lock.release()

    def holds(self, key: PageKey) -> bool:
        """Whether a page is there, as far as is known without reading it. O(1), from any thread."""
        return self._index.holds(key)

    def write(
        self, domain: bytes, keys: Sequence[PageKey], pages: Sequence[Buffer], above: Sequence[PageKey] = ()
    ) -> int:
        """Store a file of pages, all of one size, those of the beginning first; returns how many are new.

        `above` are the pages that the file stands behind, from the root down: without them it is worth nothing.
        Those that are there already are skipped; neither they, nor those above, nor what is stored now is evicted for
        the rest of the file, and all of them have been used now. Less is stored where no more room can be made, and
        nothing more once the disk refuses.
        """
        assert len(domain) == _DIGEST_BYTES, "an domain is a digest of 32 bytes"
        path = [*above, *keys]
        with self._writing:
            self._remove_all(self._index.empty_files())
            kept = self._index.names_holding(path)
            views = {key: memoryview(page).cast("B") for key, page in zip(keys, pages, strict=True)}
            fresh = [(key, view) for key, view in views.items() if not self._index.holds(key)]
            files: list[PageFile] = []
            stored = 0
            while stored < len(fresh) and (file := self._write_file(domain, fresh[stored:], kept)) is not None:
                kept.add(file.name)
                files.append(file)
                stored += file.num_pages
            self._finish_write(path, files)
        self._monitor.add("written", stored)
        return stored

    def read(self, key: PageKey, into: memoryview) -> bool:
        """Fill `into` with one page; False if it is not there, or not as it was written."""
        return self.read_run([key], into) == 1

    def read_run(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Fill `into`, which has room for exactly `keys`, with the longest prefix of them that can be had.

        Returns how many pages are right; what is in `into` behind them means nothing.
        A file in which anything is wrong is dropped as a whole.
        """
        space = into.cast("B")
        spans = self._index.spans(keys)
        self._touch(span.file for span in spans)
        done = 0
        for span in spans:
            page_bytes = span.header.page_bytes
            assert len(space) == len(keys) * page_bytes, f"a page has {page_bytes} bytes"
            got = self._read_stretch(span, space[done * page_bytes : (done + span.count) * page_bytes])
            done += got
            if got < span.count:
                break
        self._monitor.add("read", done)
        return done

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Note that a prefix was used though it was not read from here, so that it is not evicted as if idle."""
        self._touch(span.file for span in self._index.spans(keys))

    def forget(self, key: PageKey) -> None:
        """Answer this page no more. Its bytes go with its file's last page; until then a restart finds it again."""
        self._index.forget(key)

    def forget_domain(self, domain: bytes) -> int:
        """Answer no page any more that a domain wrote; returns how many there were."""
        return self._index.forget_domain(domain)

    def sweep(self) -> None:
        """Remove the files of which every page was forgotten."""
        with self._writing:
            self._remove_all(self._index.empty_files())

    def enforce_limits(self) -> int:
        """Evict what domains have above their limits; returns how many pages went."""
        with self._writing:
            return self._evict(self._index.victims_over_limits())

    def check_integrity(self) -> None:
        """Recount the index and compare it with the folder. For a tier at rest."""
        self._index.check_integrity()
        there = sum(entry.num_bytes for entry in self._files.entries() if is_our_name(entry.name))
        assert there <= self.bytes_used, f"{there} bytes lie in the folder and {self.bytes_used} are counted"
        assert self.bytes_used <= self._index.max_bytes, "more is used than allowed"

    def _write_file(
        self, domain: bytes, fresh: Sequence[tuple[PageKey, memoryview]], kept: set[str]
    ) -> PageFile | None:
        """Write one file of as many of the first pages as find room; None if none could be written."""
        page_bytes = len(fresh[0][1])
        assert page_bytes > 0
        assert all(len(view) == page_bytes for _, view in fresh), "the pages of one file are of one size"
        count = self._make_room(domain, len(fresh), page_bytes, kept)
        if count == 0:
            return None
        keys, views = zip(*fresh[:count], strict=True)
        header = PageFileHeader(self._layout, domain, page_bytes, keys, checksums_of(views))
        stamp = self._index.new_stamp(self._now_ns())
        file = PageFile(file_name(keys[-1], stamp), header.file_bytes, header, stamp)
        return file if self._index.reserve(file) and self._put(file, [header.encode(), *views]) else None

    def _make_room(self, domain: bytes, num_pages: int, page_bytes: int, kept: set[str]) -> int:
        """Evict for one file, smaller where not all pages can have room; returns how many it may hold."""
        count = min(num_pages, MAX_PAGES, max(self._file_bytes // page_bytes, 1))
        while count > 0:
            victims = self._index.victims_for(domain, file_bytes(count, page_bytes), kept)
            if victims is not None:
                self._evict(victims)
                return count
            count //= 2
        return 0

    def _put(self, file: PageFile, contents: Sequence[Buffer]) -> bool:
        """Bring a claimed file to the disk and publish it. What a failure leaves stays counted until a restart."""
        if self._files.put(file.name, contents, file.used_at_ns):
            self._index.publish(file)
            return True
        if self._files.remove_remains(file.name):
            self._index.free(file)
        return False

    def _finish_write(self, path: Sequence[PageKey], files: list[PageFile]) -> None:
        """Make new names last, and the file with the beginning of a path the last of its files to be evicted."""
        self._touch([*(span.file for span in self._index.spans(path)), *files])
        if files:
            self._files.sync()

    def _read_stretch(self, span: FileSpan, space: memoryview) -> int:
        """How many pages from the first on are right."""
        file, header, size = span.file, span.header, span.header.page_bytes
        num_bytes = self._files.read(file.name, header.page_offset(span.first), space)
        if num_bytes is None:
            self._remove(file)
            return 0
        for number in range(span.count):
            page = space[number * size : (number + 1) * size]
            is_whole = num_bytes >= (number + 1) * size
            if not is_whole or page_checksum(page) != header.checksums[span.first + number]:
                if self._remove(file):
                    self._monitor.record_corrupt(
                        file.name, "a page is wrong" if is_whole else "the file is cut off or gone"
                    )
                return number
        return span.count

    def _touch(self, files: Iterable[PageFile]) -> None:
        """Mark files as used, the first of them last: a prefix without its beginning is worth nothing."""
        for file in reversed(list(dict.fromkeys(files))):
            stamp = self._index.touch(file, self._now_ns())
            if stamp is not None:
                self._files.stamp(file.name, stamp)

    def _now_ns(self) -> int:
        return int(self._clock.now() * 1e9)

    def _evict(self, victims: list[PageFile]) -> int:
        lost = self._remove_all(victims)
        self._monitor.add("evicted", lost)
        return lost

    def _remove_all(self, files: list[PageFile]) -> int:
        """Remove files; returns how many pages went with them."""
        lost = 0
        for file in files:
            num_live = file.num_live
            if self._remove(file):
                lost += num_live
        return lost

    def _remove(self, file: PageFile) -> bool:
        """Let nothing find a file, then remove it; False if somebody else is at it already."""
        if not self._index.retire(file):
            return False
        if self._files.remove(file.name):
            self._index.free(file)
        else:
            self._index.mark_unremovable(file, self._now_ns())
        return True
