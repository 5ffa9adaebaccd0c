"""Stores KV pages on disk, in checksummed files within a budget of bytes. Those of domains with a key are encrypted.

DiskStore owns its folder: only it writes, reads and removes files there.

Invariants:

    A read returns exactly the bytes that were written under the page's key, or nothing. This holds after a crash at
    any point, on a full disk, and for files that were changed, cut off, swapped or removed.
    The folder never holds more than `max_bytes` of pages, not even while a file is being written.
    Only `open` raises an error when the disk fails. All other methods handle the failure.

A file is written under another name, synced and renamed, so only complete files have their final name. A file's
modification time is its time of last use, so the order of eviction survives a restart.

Writes and removals run one at a time. Reads run at the same time as them. Call all of these on worker threads. `holds`,
`forget`, `forget_domain` and the counts touch no file and may be called from any thread. A reader that has opened a
file can finish even if the file is evicted.
"""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.file_format import (
    MAX_PAGES,
    FileSpan,
    PageFile,
    PageFileHeader,
    file_bytes,
)
from graftwork.engine.kv.disk.files import Buffer, FaultTolerantFiles, FileSystem, LocalFiles
from graftwork.engine.kv.disk.index import NO_OBJECTS, DiskCounters, DiskIndex, DiskMonitor, ObjectFigures
from graftwork.engine.kv.disk.keyring import Keyring
from graftwork.engine.kv.disk.lock import FolderLock
from graftwork.engine.kv.disk.recovery import FolderScan, file_name, is_our_name
from graftwork.platform.clock import Clock, SystemClock

_FILE_BYTES = 64 * 2**20
"""The most bytes of pages in one file. A file is evicted as a whole, and one bad sector loses the whole file."""
_SEALED_FILE_BYTES = 16 * 2**20
"""The most bytes of pages in one encrypted file: so much memory is taken besides while it is written."""
_FILES_AT_LEAST = 16
"""Even a small budget has room for this many files, so that an eviction never removes all pages."""
_DIGEST_BYTES = 32


class DiskStore:
    """Owns the KV pages that one engine keeps on disk."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        layout: bytes,
        files: FileSystem | None = None,
        clock: Clock | None = None,
        reserve_share: float = 0.0,
    ) -> None:
        """`layout` is a 32-byte digest of everything that decides the meaning of a page's bytes, including the page
        size.

        `reserve_share` of `max_bytes` is divided equally among the domains that have files.
        """
        assert len(layout) == _DIGEST_BYTES, "a layout is a digest of 32 bytes"
        self._layout = layout
        self._clock = clock or SystemClock()
        self._monitor = DiskMonitor(self._clock)
        self._files = FaultTolerantFiles(files or LocalFiles(folder), self._monitor)
        self._folder_lock = FolderLock(folder)
        self.keyring = Keyring()
        """The keys of encrypted files."""
        self._index = DiskIndex(max_bytes, int(reserve_share * max_bytes), self.keyring)
        self._file_bytes = min(_FILE_BYTES, max_bytes // _FILES_AT_LEAST)
        self._writing = threading.Lock()

    @property
    def bytes_used(self) -> int:
        """The total size in bytes of the store's files, including the file that is being written."""
        return self._index.bytes_used

    @property
    def num_pages(self) -> int:
        """The number of pages that are stored. Those whose key has not come yet count, though `holds` returns False."""
        return self._index.num_pages

    @property
    def counters(self) -> DiskCounters:
        return self._monitor.snapshot()

    @property
    def objects(self) -> ObjectFigures:
        """Nothing: a folder is no bucket."""
        return NO_OBJECTS

    def files_of(self, keys: Sequence[PageKey]) -> list[PageFile]:
        """Returns the records of the files that contain pages of `keys`. Any thread may call it."""
        return self._index.files_holding(keys)

    def content_of(self, file: PageFile) -> bytes | None:
        """Reads a whole file, with its header. Returns None if it is gone, or if all of its pages were forgotten."""
        content = bytearray(file.num_bytes)
        if not file.num_live or self._files.read(file.name, 0, memoryview(content)) != file.num_bytes:
            return None
        return bytes(content)

    def bytes_of(self, domain: bytes) -> int:
        """Returns the total size in bytes of all files of a domain (usually one tenant). `domain` is the domain's
        digest.
        """
        return self._index.bytes_of(domain)

    def set_limit(self, domain: bytes, num_bytes: int | None) -> None:
        """Sets the largest total size in bytes of the files of a domain (usually one tenant). None removes the limit.

        `domain` is the domain's digest. When room is needed, files of domains over their limit are evicted first.
        `enforce_limits` evicts them at once.
        """
        self._index.set_limit(domain, num_bytes)

    def set_reserve(self, domain: bytes, num_bytes: int) -> None:
        """Sets the reserve of a domain (usually one tenant), in bytes. `domain` is the domain's digest.

        While the domain's files take no more bytes than this, none of them is evicted to make room for other domains.
        """
        self._index.set_reserve(domain, num_bytes)

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        """Reads and writes the files of a domain (usually one tenant) with a key from now on. Touches no file.

        If the domain had none, its plain pages are forgotten. Returns whether `sweep` should be called, to remove them.
        """
        return self.keyring.add(domain, key) and self._index.forget_domain(domain, only_plain=True) > 0

    def open(self, timeout_s: float = 0.0) -> None:
        """Locks the folder and finds the pages that an earlier process left there.

        Waits up to `timeout_s` seconds if another process still has the folder locked.

        Removes incomplete and damaged files. Keeps files of other layouts until room is needed. Ignores files whose
        names are not the store's, and does not count their bytes. Raises InvalidRequest if the folder cannot be used.
        """
        self._folder_lock.acquire(timeout_s)
        self._find_files()

    def try_open(self) -> bool:
        """Does what `open` does, unless another process has the folder locked. Returns whether the store is open."""
        if not self._folder_lock.try_acquire():
            return False
        self._find_files()
        return True

    def _find_files(self) -> None:
        for file in FolderScan(self._files, self._monitor, self._layout).page_files():
            self._index.add(file)
        with self._writing:
            self._remove_all(self._index.empty_files())
            self._evict(self._index.victims_for(None, 0, ()) or [])

    def close(self) -> None:
        """Releases the lock on the folder. The files stay on disk."""
        self._folder_lock.release()

    def holds(self, key: PageKey) -> bool:
        """Returns whether a page is stored and its key is here, without reading it. O(1). Any thread may call it."""
        return self._index.holds(key)

    def write(
        self, domain: bytes, keys: Sequence[PageKey], pages: Sequence[Buffer], above: Sequence[PageKey] = ()
    ) -> int:
        """Stores pages that follow each other in one prompt, first page first. Returns how many pages it has written.

        `domain` is the digest of the domain (usually one tenant) that the pages are charged to. `above` are the keys of
        all pages before `keys` in the prompt. Without these pages, the new pages cannot be used. All pages of one call
        have the same size. Skips pages that are stored already. Evicts no page of `above` or `keys` during the call,
        and marks all of them as just used. Stores fewer pages if there is too little room or the disk fails, and none
        if the domain's key was destroyed.
        """
        assert len(domain) == _DIGEST_BYTES, "a domain is a digest of 32 bytes"
        path, domain = [*above, *keys], self._index.same_digest(domain)
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
        """Reads the content of one page into `into`. Returns False if the page is not stored or is damaged."""
        return self.read_pages([key], into) == 1

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Reads the pages of the longest prefix of `keys` that is stored and not damaged.

        `into` must have room for the pages of all keys. Returns how many pages were read correctly. The content of
        `into` after these pages is undefined. If a file has any error, removes the file.
        """
        space = into.cast("B")
        spans = self._index.spans(keys)
        self._touch(span.file for span in spans)
        done = 0
        for span in spans:
            page_bytes = span.header.page_bytes
            assert len(space) == len(keys) * page_bytes, f"a page has {page_bytes} bytes"
            got = self._read_span(span, space[done * page_bytes : (done + span.count) * page_bytes])
            done += got
            if got < span.count:
                break
        self._monitor.add("read", done)
        return done

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Marks the files of pages as just used, so that these files are evicted later.

        Call it for pages that were used on the device or the host, without a read from the disk.
        """
        self._touch(span.file for span in self._index.spans(keys))

    def forget(self, key: PageKey) -> None:
        """Forgets where a page is, so that the page is no longer found.

        The page's content is removed from the disk when the store has forgotten all pages of the same file. If the
        process restarts before that, the new process finds the page again.
        """
        self._index.forget(key)

    def forget_domain(self, domain: bytes) -> int:
        """Forgets where the pages of a domain (usually one tenant) are, so that they are no longer found.

        `domain` is the domain's digest. Its key is destroyed, if it had one. Returns the number of these pages.
        """
        self.keyring.destroy(domain)
        return self._index.forget_domain(domain)

    def sweep(self) -> None:
        """Removes each file from the disk if `forget` or `forget_domain` was called for all pages in it."""
        with self._writing:
            self._remove_all(self._index.empty_files())

    def enforce_limits(self) -> int:
        """Evicts files until every domain (usually one tenant) is within its limit. Returns how many pages were
        evicted.
        """
        with self._writing:
            return self._evict(self._index.victims_over_limits())

    def check_integrity(self) -> None:
        """Recounts the files, pages and bytes of the store, and compares the counted bytes with the folder.

        Call it only while no write is running.
        """
        self._index.check_integrity()
        self._monitor.check_integrity()
        there = sum(entry.num_bytes for entry in self._files.entries() if is_our_name(entry.name))
        assert there <= self.bytes_used, f"{there} bytes lie in the folder and {self.bytes_used} are counted"
        assert self.bytes_used <= self._index.max_bytes, "more is used than allowed"

    def _write_file(
        self, domain: bytes, fresh: Sequence[tuple[PageKey, memoryview]], kept: set[str]
    ) -> PageFile | None:
        """Writes one file with as many of the pages as fit, from the first on.

        Returns None if none could be written.
        """
        page_bytes = len(fresh[0][1])
        assert page_bytes > 0
        assert all(len(view) == page_bytes for _, view in fresh), "the pages of one file are of one size"
        count = self._make_room(domain, len(fresh), page_bytes, kept)
        if count == 0:
            return None
        keys, views = zip(*fresh[:count], strict=True)
        contents = self.keyring.prepare(self._layout, domain, keys, views)
        if contents is None:
            return None
        header = PageFileHeader(self._layout, domain, page_bytes, keys, contents.checksums, contents.salt)
        stamp = self._index.new_stamp(self._now_ns())
        file = PageFile(file_name(keys[-1], stamp), header.file_bytes, header, stamp)
        return file if self._index.claim(file) and self._put(file, [header.encode(), *contents.pages]) else None

    def _make_room(self, domain: bytes, num_pages: int, page_bytes: int, kept: set[str]) -> int:
        """Makes room for one file with `num_pages` pages, or fewer if needed.

        Returns how many pages the file may have.
        """
        is_sealed = self.keyring.seals(domain)
        most_bytes = min(self._file_bytes, _SEALED_FILE_BYTES) if is_sealed else self._file_bytes
        count = min(num_pages, MAX_PAGES, max(most_bytes // page_bytes, 1))
        while count > 0:
            victims = self._index.victims_for(domain, file_bytes(count, page_bytes, is_sealed=is_sealed), kept)
            if victims is not None:
                self._evict(victims)
                return count
            count //= 2
        return 0

    def _put(self, file: PageFile, contents: Sequence[Buffer]) -> bool:
        """Writes a claimed file and makes its pages findable. Returns whether this succeeded.

        If what a failed write has left cannot be removed, the file's bytes stay counted until a restart.
        """
        if self._files.put(file.name, contents, file.used_at_ns):
            self._index.publish(file)
            if file.domain is not None and self.keyring.is_destroyed(file.domain):  # since then
                self._index.forget_domain(file.domain)
            elif file.header is not None and file.header.salt is None and not self.keyring.opens(file.header):
                self._index.forget_domain(file.header.domain, only_plain=True)
            return True
        if self._files.remove_partial(file.name):
            self._index.free(file)
        return False

    def _finish_write(self, path: Sequence[PageKey], files: list[PageFile]) -> None:
        """Marks the files of all pages in `path` as just used, the first file last, so that it is evicted last.

        Syncs the names of new files to disk.
        """
        self._touch([*(span.file for span in self._index.spans(path)), *files])
        if files:
            self._files.sync()

    def _read_span(self, span: FileSpan, space: memoryview) -> int:
        """Reads consecutive pages of one file into `space`. Returns how many are correct, counted from the first."""
        file = span.file
        num_bytes = self._files.read(file.name, span.header.page_offset(span.first), space)
        if num_bytes is None:
            self._remove(file)
            return 0
        check = self.keyring.check(span, num_bytes, space)
        if check.trouble is not None and self._remove(file):
            self._monitor.record_corrupt(file.name, check.trouble)
        return check.num_good

    def _touch(self, files: Iterable[PageFile]) -> None:
        """Marks files as used, the first file last: later pages of a prompt are worthless without earlier pages."""
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
        """Removes files. Returns how many pages were found in them before."""
        lost = 0
        for file in files:
            num_live = file.num_live
            if self._remove(file):
                lost += num_live
        return lost

    def _remove(self, file: PageFile) -> bool:
        """Hides a file in the index and then removes it. Returns False if another thread has hidden it already."""
        if not self._index.retire(file):
            return False
        if self._files.remove(file.name):
            self._index.free(file)
        else:
            self._index.mark_unremovable(file, self._now_ns())
        return True
