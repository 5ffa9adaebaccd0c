"""Finds, reads, writes and erases KV pages that engines share in a bucket.

    layout / domain / <last key>-<time>.kvpages      one object: the whole file of one engine's disk, header and pages

All engines of a layout read all of its objects. ObjectPages knows what `refresh` has listed and what it has written
itself. It removes the objects that were used longest ago when all together take more than `max_bytes`; between two
listings engines know nothing of each other's objects, so the bucket may hold a little more or less for a moment.

Invariants: a read returns exactly the bytes that were written under a page's key, or nothing, because each page is checked
against the header's checksum. After `forget_domain`, no page of the domain is found, and `sweep` removes its objects, of
all layouts; one that is being written meanwhile is removed when it is written. While the bucket does not answer, no page
in it is found: requests compute what they need.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.bucket import Bucket, attempt
from graftwork.engine.kv.disk.file_format import DamagedFile, FileSpan, ForeignFile, PageFile
from graftwork.engine.kv.disk.files import FileEntry
from graftwork.engine.kv.disk.index import DiskCounters, DiskIndex, DiskMonitor, ObjectFigures
from graftwork.engine.kv.disk.keyring import Keyring
from graftwork.engine.kv.disk.object_uploads import ObjectUploads, Upload
from graftwork.engine.kv.disk.recovery import is_our_name, read_header
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import Clock

_HEADERS_AT_ONCE = 8
_FAILED = "object_failed"


class ObjectPages:
    """The pages in a bucket. `holds`, `offer` and the methods that forget never wait, and any thread may call them."""

    def __init__(self, bucket: Bucket, layout: bytes, max_bytes: int, clock: Clock, keyring: Keyring) -> None:
        """`layout` is the digest that the headers must have. `keyring` is that of the engine's own store."""
        self._bucket = bucket
        self._layout = layout
        self._folder = layout.hex()[:32]
        self._clock = clock
        self._monitor = DiskMonitor(clock)
        self._keyring = keyring
        self._index = DiskIndex(max_bytes, keyring=keyring)
        self._known: dict[str, PageFile] = {}
        """By name: the objects that were found or written. Their header is None if they cannot be used."""
        self._changing = threading.Lock()
        """Held to change the objects that are known, and never while the bucket is used."""
        self._writing: str | None = None
        """The object that is being written."""
        self._is_reachable = False
        self._num_forgets = 0
        self._forgotten: dict[bytes, int] = {}
        """By domain that was forgotten: the number of the forgetting, counted from 1."""
        self._to_erase: dict[bytes, int] = {}
        """Those whose objects are not removed yet."""
        self._uploads = ObjectUploads(self._upload, self._monitor)

    @property
    def counters(self) -> DiskCounters:
        return self._monitor.snapshot()

    @property
    def objects(self) -> ObjectFigures:
        return ObjectFigures(self._index.num_pages, self._index.bytes_used)

    @property
    def num_pages(self) -> int:
        """The number of pages that were found."""
        return self._index.num_pages

    def holds(self, key: PageKey) -> bool:
        """Returns whether a page is in the bucket, as far as is known, and the bucket answers. O(1)."""
        return self._is_reachable and self._index.holds(key)

    def refresh(self) -> None:
        """Lists the objects, reads the headers of new ones, and removes some if there are too many."""
        before = set(self._known)  # an object that is written from now on may be missing in the list
        listed = attempt(lambda: self._bucket.entries(self._folder), self._lose_contact)
        if listed is None:
            return
        found = {entry.name: entry for entry in listed if is_our_name(entry.name.rpartition("/")[2])}
        for name in before - found.keys():
            self._drop(name)
        self._is_reachable = True
        new = sorted((found[name] for name in found.keys() - before), key=lambda entry: entry.used_at_ns)
        with ThreadPoolExecutor(_HEADERS_AT_ONCE, "kv-headers") as readers:
            for file in readers.map(self._read_header, new):
                if file is not None:
                    self._add(file)
        self._evict(self._index.victims_for(None, 0, ()) or [])

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Reads the pages of the longest prefix of `keys` that is in the bucket and not damaged.

        `into` must have room for the pages of all keys. Returns how many pages were read correctly. The content of `into`
        after these pages is undefined. Removes an object with a wrong page.
        """
        if not self._is_reachable:
            return 0
        space, done = into.cast("B"), 0
        for span in self._index.spans(keys):
            page_bytes = span.header.page_bytes
            assert len(space) == len(keys) * page_bytes, f"a page has {page_bytes} bytes"
            got = self._read_span(span, space[done * page_bytes : (done + span.count) * page_bytes])
            done += got
            if got < span.count:
                break
            self._index.touch(span.file, self._now_ns())
        self._monitor.add("object_read", done)
        return done

    def offer(self, own: DiskStore, keys: Sequence[PageKey]) -> None:
        """Queues those files of an engine's disk for upload that have pages of `keys`, and are not in the bucket yet."""
        for file in own.files_of(keys):
            if self._name_of(file) not in self._known and not self._has_all(file):
                self._uploads.put(Upload(own, file, tuple(keys), self._num_forgets))

    def forget(self, key: PageKey) -> None:
        """Forgets where a page is. `sweep` removes an object when all of its pages are forgotten."""
        self._index.forget(key)

    def forget_plain(self, domain: bytes) -> int:
        """Forgets the pages of a domain that are not encrypted. `sweep` removes their objects. Returns their number."""
        return self._index.forget_domain(domain, only_plain=True)

    def forget_domain(self, domain: bytes) -> int:
        """Forgets all pages of a domain (usually one tenant), and has `sweep` remove their objects.

        `domain` is the domain's digest. Returns the number of these pages.
        """
        with self._changing:
            self._num_forgets += 1
            self._forgotten[domain] = self._to_erase[domain] = self._num_forgets
        return self._index.forget_domain(domain)

    def sweep(self) -> None:
        """Removes the objects of forgotten pages, and those of forgotten domains in all layouts.

        What cannot be removed now is tried again by the next call.
        """
        self._evict(self._index.empty_files(), counter=None)
        with self._changing:
            asked = dict(self._to_erase)
        if not asked or attempt(lambda: self._erase(asked), self._lose_contact) is None:
            return
        with self._changing:  # what was forgotten again meanwhile is left for the next call
            self._to_erase = {
                domain: number for domain, number in self._to_erase.items() if number != asked.get(domain)
            }

    def flush(self) -> None:
        """Returns when all files that are queued now were uploaded, or could not be."""
        self._uploads.flush()

    def close(self) -> None:
        """Ends the uploads, after those that are queued if the bucket takes them in time."""
        self._uploads.close()

    def check_integrity(self) -> None:
        """Checks the index, and that every page lies in an object that is known."""
        self._monitor.check_integrity()
        self._index.check_integrity()
        assert self._index.names_holding(self._index.keys()) <= self._known.keys(), "a page lies in an unknown object"

    # ---- objects ----------------------------------------------------------------------------------------------

    def _name_of(self, file: PageFile) -> str:
        assert file.domain is not None
        return f"{self._folder}/{file.domain.hex()}/{file.name}"

    def _has_all(self, file: PageFile) -> bool:
        return file.header is not None and all(map(self._index.holds, file.header.keys))

    def _read_header(self, entry: FileEntry) -> PageFile | None:
        """Returns the record of a new object; None if it cannot be read now, or is gone."""
        file = PageFile(entry.name, entry.num_bytes, None, entry.used_at_ns)
        try:
            header = read_header(self, entry)
        except ForeignFile:
            return file
        except DamagedFile as error:
            self._monitor.record_corrupt(entry.name, str(error))
            return file
        if header is None:
            return None
        if header.layout == self._layout and entry.name.split("/")[-2] == header.domain.hex():
            file.header = header
        return file

    def read(self, name: str, offset: int, into: memoryview) -> int | None:
        """Reads bytes of an object for `read_header`. Returns None if it is gone, or the bucket fails."""
        try:
            return self._bucket.read(name, offset, into)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._lose_contact(error)
            return None

    def _add(self, file: PageFile) -> None:
        with self._changing:
            if file.name in self._known or file.name == self._writing:
                return  # this engine writes it
            self._known[file.name] = file
            self._index.add(file)
            if file.domain in self._to_erase:
                self._index.forget_domain(file.domain)

    def _drop(self, name: str) -> None:
        """Forgets an object that does not exist any more."""
        with self._changing:
            file = self._known.pop(name, None)
            if file is not None and self._index.retire(file):
                self._index.free(file)

    def _read_span(self, span: FileSpan, space: memoryview) -> int:
        """Reads consecutive pages of one object into `space`. Returns how many are correct, counted from the first."""
        name = span.file.name
        try:
            num_bytes = self._bucket.read(name, span.header.page_offset(span.first), space)
        except FileNotFoundError:
            self._drop(name)
            return 0
        except OSError as error:
            self._lose_contact(error)
            return 0
        check = self._keyring.check(span, num_bytes, space)
        if check.trouble is not None:
            self._monitor.record_corrupt(name, check.trouble)
            self._evict([span.file], counter=None)
        return check.num_good

    def _upload(self, upload: Upload) -> None:
        """Writes one file of an engine's disk to the bucket, unless it is gone or its domain was forgotten."""
        file, domain = upload.file, upload.file.domain
        assert domain is not None
        if self._was_forgotten(upload) or self._has_all(file):
            return
        content = upload.own.content_of(file)
        own = PageFile(self._name_of(file), file.num_bytes, file.header, self._index.new_stamp(self._now_ns()))
        if content is None or not self._claim(own, upload.path):
            return
        is_written = attempt(lambda: self._put(own.name, content), self._lose_contact)
        with self._changing:
            self._writing = None
            if not is_written:
                self._index.free(own)
                return
            self._known[own.name] = own
            self._index.publish(own)
            self._monitor.add("object_written", own.num_pages)
        for span in reversed(self._index.spans(upload.path)):
            self._index.touch(span.file, self._now_ns())  # the first pages of a prompt are removed last
        if self._was_forgotten(upload):
            self._evict([own], counter=None)

    def _put(self, name: str, content: bytes) -> bool:
        """Writes an object. Raises OSError."""
        self._bucket.put(name, content)
        return True

    def _was_forgotten(self, upload: Upload) -> bool:
        return self._forgotten.get(upload.file.domain or b"", 0) > upload.num_forgets

    def _claim(self, own: PageFile, path: Sequence[PageKey]) -> bool:
        """Makes room for an object and counts its bytes. Returns whether there is room."""
        kept = self._index.names_holding(path)
        victims = self._index.victims_for(own.domain, own.num_bytes, kept)
        if victims is None:
            self._monitor.add("object_dropped", own.num_pages)
            return False
        self._evict(victims)
        with self._changing:
            is_claimed = self._index.claim(own)
            self._writing = own.name if is_claimed else None
            return is_claimed

    def _evict(self, victims: Sequence[PageFile], counter: str | None = "evicted") -> None:
        """Removes objects. One that cannot be removed is found again by the next listing."""
        for file in victims:
            with self._changing:
                num_live = file.num_live
                if not self._index.retire(file):
                    continue
                self._known.pop(file.name, None)
                self._index.free(file)
            attempt(partial(self._bucket.remove, [file.name]), self._note_failure)
            if counter is not None:
                self._monitor.add(counter, num_live)

    def _erase(self, domains: dict[bytes, int]) -> bool:
        """Removes the objects of domains in all layouts. Raises OSError."""
        for layout in self._bucket.folders():
            for domain in domains:
                self._bucket.remove([entry.name for entry in self._bucket.entries(f"{layout}/{domain.hex()}")])
        return True

    def _lose_contact(self, error: OSError) -> None:
        """Finds no page in the bucket until it can be listed again, so that requests do not wait for it one by one."""
        self._is_reachable = False
        self._note_failure(error)

    def _note_failure(self, error: OSError) -> None:
        self._monitor.record_failure("the bucket", error, _FAILED)

    def _now_ns(self) -> int:
        return int(self._clock.now() * 1e9)
