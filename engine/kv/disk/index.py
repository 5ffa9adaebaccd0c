"""Finds the file that contains a given KV page, and counts the bytes, the operations and the failures of the disk
store.

DiskIndex owns one record for each file. A file is in one of these states:

    claimed    the file is being written: its bytes are counted, but a lookup does not find its pages yet
    published  a lookup finds the file's pages, and the file may be evicted
    retired    a lookup no longer finds the file's pages, but its bytes are counted until the file is removed
    freed      the file was removed, and the index has no record of it

The index never reads, writes or removes a file. Each method is atomic: it holds one lock, but never during I/O, so the
engine's loop may call it while a worker writes. `holds` takes no lock. Invariant: the counted bytes are never less than
the bytes in the folder. DiskMonitor owns the counters, and logs failures at most once a minute.
"""

import logging
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.eviction import DomainUsage, VictimSearch
from graftwork.engine.kv.disk.file_format import FileSpan, PageFile
from graftwork.engine.kv.disk.keyring import Keyring
from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)


_SECONDS_BETWEEN_LINES = 60.0
_MAX_DIGESTS = 10_000


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Counts what the disk store has done since it was created."""

    written: int = 0
    """The number of pages written to disk."""
    read: int = 0
    """The number of pages read from disk with a correct checksum."""
    evicted: int = 0
    """The number of pages removed from disk to make room or to enforce a limit."""
    corrupt: int = 0
    """The number of files removed because a checksum or a length was wrong."""
    foreign: int = 0
    """The number of files that could not be used at start: they have another layout or version, or other programs made
    them.
    """
    failed: int = 0
    """The number of operations that failed in the file system, for example because the disk was full."""
    object_written: int = 0
    """The number of pages written to a bucket."""
    object_read: int = 0
    """The number of pages read from a bucket with a correct checksum."""
    object_failed: int = 0
    """The number of operations on a bucket that failed."""
    object_dropped: int = 0
    """The number of pages that were not written to a bucket, because it has no room or uploads are too slow."""


@dataclass(frozen=True, slots=True)
class ObjectFigures:
    """What is in a bucket, as far as one engine knows."""

    num_pages: int = 0
    num_bytes: int = 0


NO_OBJECTS = ObjectFigures()


class DiskMonitor:
    """Owns the counters of the disk store (DiskCounters). Every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last_line_at: float | None = None

    def snapshot(self) -> DiskCounters:
        with self._lock:
            return DiskCounters(**self._counts)

    def add(self, counter: str, amount: int = 1) -> None:
        """Adds `amount` to one counter. `counter` is the name of a field of DiskCounters."""
        with self._lock:
            self._counts[counter] += amount

    def record_corrupt(self, name: str, reason: str) -> None:
        """Counts and logs a file whose content was wrong. `name` is the name of the file."""
        self.add("corrupt")
        self._log_failure("disk_tier_corrupt", name, reason)

    def record_failure(self, name: str, error: OSError, counter: str = "failed") -> None:
        """Counts and logs a failed operation of the file system or a bucket. `name` is the name of the file."""
        self.add(counter)
        self._log_failure("disk_tier_failed", name, str(error))

    def check_integrity(self) -> None:
        """Checks that every counter is a field of DiskCounters, and that no counter is negative."""
        assert all(count >= 0 for count in astuple(self.snapshot())), "a counter is negative"

    def _log_failure(self, event: str, name: str, reason: str) -> None:
        with self._lock:
            now = self._clock.monotonic()
            if self._last_line_at is not None and now - self._last_line_at < _SECONDS_BETWEEN_LINES:
                return
            self._last_line_at = now
            totals = {counter: self._counts[counter] for counter in ("corrupt", "failed")}
        _log.warning(event, extra={"file": name, "reason": reason, **totals})


class DiskIndex:
    """Records the files of the disk store's folder, their sizes and the pages in them.

    The sizes of all files together should be at most `max_bytes`.
    """

    def __init__(self, max_bytes: int, shared_reserve_bytes: int = 0, keyring: Keyring | None = None) -> None:
        """Lookups find only pages that `keyring` opens."""
        self.max_bytes = max_bytes
        self._keyring = keyring or Keyring()
        self._lock = threading.Lock()
        self._locations: dict[PageKey, PageFile] = {}
        self._queues: dict[bytes | None, OrderedDict[str, PageFile]] = {}
        self._usage = DomainUsage(shared_reserve_bytes)
        self._hidden: dict[str, PageFile] = {}
        """Claimed or retired files. The bytes of these files are counted, but their pages are not found."""
        self._empty: dict[str, PageFile] = {}
        """Published files in which no page is found any more."""
        self._digests: dict[bytes, bytes] = {}  # at most _MAX_DIGESTS; see same_digest
        self._last_stamp_ns = 0

    @property
    def num_pages(self) -> int:
        return len(self._locations)

    @property
    def bytes_used(self) -> int:
        return self._usage.total

    def bytes_of(self, domain: bytes) -> int:
        return self._usage.bytes_of(domain)

    def holds(self, key: PageKey) -> bool:
        file = self._locations.get(key)
        return file is not None and self._keyring.opens(file.header)

    def set_limit(self, domain: bytes, num_bytes: int | None) -> None:
        with self._lock:
            self._usage.set_limit(domain, num_bytes)

    def set_reserve(self, domain: bytes, num_bytes: int) -> None:
        with self._lock:
            self._usage.set_reserve(domain, num_bytes)

    def claim(self, file: PageFile) -> bool:
        """Counts the bytes of a file before it is written.

        Returns False, and counts nothing, if the bytes of all files would then exceed `max_bytes`.
        """
        with self._lock:
            if self._usage.total + file.num_bytes > self.max_bytes:
                return False
            self._claim(file)
            return True

    def publish(self, file: PageFile) -> None:
        """Lets lookups find the pages of a file that is now written. Before, `claim` must have counted the file's
        bytes.

        If an older file contains the same pages, lookups no longer find them there.
        """
        with self._lock:
            self._publish(file)

    def add(self, file: PageFile) -> None:
        """Counts the bytes of a file that is on the disk already, and lets lookups find its pages.

        Accepts the file even if the bytes of all files then exceed `max_bytes`.
        """
        with self._lock:
            if file.header is not None:
                layout, domain = map(self._same_digest, (file.header.layout, file.header.domain))
                file.header = replace(file.header, layout=layout, domain=domain)
            self._claim(file)
            self._publish(file)

    def same_digest(self, digest: bytes) -> bytes:
        """Returns one object for all equal digests of domains, because each write comes with an object of its own."""
        with self._lock:
            return self._same_digest(digest)

    def retire(self, file: PageFile) -> bool:
        """Prepares a published file for removal from the disk.

        Before this call, lookups find the file's pages. After it, they do not, but the file's bytes stay counted.
        Returns False if the file is not published.
        """
        with self._lock:
            queue = self._queues.get(file.domain, OrderedDict())
            if queue.pop(file.name, None) is None:
                return False
            if not queue:
                del self._queues[file.domain]
            self._hidden[file.name] = file
            for key in file.header.keys if file.header is not None else ():
                self._remove_location(file, key)
            self._empty.pop(file.name, None)
            return True

    def free(self, file: PageFile) -> None:
        """Forgets a file that no longer exists on the disk, and stops counting its bytes.

        The file must not be published, which means that lookups do not find its pages.
        """
        with self._lock:
            del self._hidden[file.name]
            self._usage.add_bytes(file.domain, -file.num_bytes)

    def mark_unremovable(self, file: PageFile, now_ns: int) -> None:
        """Records that a file could not be removed from the disk after `retire`.

        The file's bytes stay counted, but no longer for its domain (usually one tenant). Its pages cannot be found. The
        store tries to remove the file again when it needs room. `now_ns` is the present time in nanoseconds. It becomes
        the file's time of last use.
        """
        with self._lock:
            del self._hidden[file.name]
            self._usage.add_bytes(file.domain, -file.num_bytes)
            remains = PageFile(file.name, file.num_bytes, None, self._new_stamp(now_ns))
            self._claim(remains)
            self._publish(remains)

    def forget(self, key: PageKey) -> None:
        """Forgets where a page is, so that lookups no longer find the page. The page's content stays in its file."""
        with self._lock:
            if key in self._locations:
                self._remove_location(self._locations[key], key)

    def forget_domain(self, domain: bytes, *, only_plain: bool = False) -> int:
        """Forgets where the pages of a domain (usually one tenant) are, so that lookups no longer find them.

        With `only_plain`, leaves encrypted files alone. Returns the number of these pages.
        """
        with self._lock:
            before = len(self._locations)
            for file in self._queues.get(domain, OrderedDict()).values():
                if file.header is not None and not (only_plain and file.header.salt):
                    for key in file.header.keys:
                        self._remove_location(file, key)
            return before - len(self._locations)

    def touch(self, file: PageFile, now_ns: int) -> int | None:
        """Marks a file as just used. Returns the file's new time of last use, in nanoseconds.

        Returns None if the file is not published, for example because it is being removed.
        """
        with self._lock:
            queue = self._queues.get(file.domain, OrderedDict())
            if file.name not in queue:
                return None
            queue.move_to_end(file.name)
            file.used_at_ns = self._new_stamp(now_ns)
            return file.used_at_ns

    def new_stamp(self, now_ns: int) -> int:
        """Returns a time in nanoseconds to record as the last use of a file.

        This is `now_ns`, or a little more if needed: each call returns a later time than all calls before it.
        """
        with self._lock:
            return self._new_stamp(now_ns)

    def spans(self, keys: Sequence[PageKey]) -> list[FileSpan]:
        """Finds the pages of the longest prefix of `keys` that is on disk.

        Returns spans in the order of `keys`. A span is a group of consecutive pages in one file.
        """
        found: list[FileSpan] = []
        with self._lock:
            for key in keys:
                file = self._locations.get(key)
                if file is None or file.header is None or not self._keyring.opens(file.header):
                    break
                last = found[-1] if found else None
                if last is not None and last.file is file and last.is_followed_by(key):
                    found[-1] = FileSpan(file, last.header, last.first, last.count + 1)
                else:
                    found.append(FileSpan(file, file.header, file.header.keys.index(key), 1))
        return found

    def keys(self) -> list[PageKey]:
        """Returns the keys of all pages that lookups find."""
        with self._lock:
            return list(self._locations)

    def files_holding(self, keys: Iterable[PageKey]) -> list[PageFile]:
        """Returns the files that contain the pages of `keys`, each once. Ignores keys that are not on disk."""
        with self._lock:
            found = (self._locations[key] for key in keys if key in self._locations)
            return list({file.name: file for file in found}.values())

    def names_holding(self, keys: Iterable[PageKey]) -> set[str]:
        """Returns the names of the files that contain the pages of `keys`. Ignores keys that are not on disk."""
        with self._lock:
            return {self._locations[key].name for key in keys if key in self._locations}

    def empty_files(self) -> list[PageFile]:
        """Returns the files in which lookups find no page any more, so that these files can be removed.

        Each of their pages was forgotten, or lookups find it in a newer file.
        """
        with self._lock:
            return list(self._empty.values())

    def victims_for(self, domain: bytes | None, num_bytes: int, kept: Collection[str]) -> list[PageFile] | None:
        """Returns the files to remove so that `domain` (usually one tenant) can store `num_bytes` more bytes.

        Returns None if that is impossible. Does not choose files named in `kept`. Changes nothing.
        """
        with self._lock:
            choice = VictimSearch(self._usage, self._queues, kept)
            return choice.victims if choice.make_room(domain, num_bytes, self.max_bytes) else None

    def victims_over_limits(self) -> list[PageFile]:
        """Returns the files to remove so that every domain (usually one tenant) is within its limit."""
        with self._lock:
            choice = VictimSearch(self._usage, self._queues, ())
            choice.enforce_limits()
            return choice.victims

    def check_integrity(self) -> None:
        """Recounts the bytes, the pages and the files without pages. Checks that files are ordered by their time of
        last use.
        """
        with self._lock:
            listed = [file for queue in self._queues.values() for file in queue.values()]
            names = [file.name for file in (*listed, *self._hidden.values())]
            assert len(set(names)) == len(names), "a file is counted twice"
            self._check_bytes([*listed, *self._hidden.values()])
            self._check_locations(listed)
            emptied = {file.name for file in listed if file.header is not None and not file.num_live}
            assert emptied == self._empty.keys(), "a file without pages is not to be swept, or another is"
            for queue in self._queues.values():
                stamps = [file.used_at_ns for file in queue.values()]
                assert stamps == sorted(stamps), "a queue is out of order"

    def _check_bytes(self, files: list[PageFile]) -> None:
        by_domain: defaultdict[bytes | None, int] = defaultdict(int)
        for file in files:
            by_domain[file.domain] += file.num_bytes
        self._usage.check_integrity(by_domain)

    def _check_locations(self, listed: list[PageFile]) -> None:
        living = {id(file): 0 for file in listed}
        for key, file in self._locations.items():
            assert id(file) in living, f"a page lies in {file.name}, which is not listed"
            assert file.header is not None
            assert key in file.header.keys, f"{file.name} does not hold a page that is found there"
            living[id(file)] += 1
        for file in listed:
            assert living[id(file)] == file.num_live, (
                f"{file.name}: {file.num_live} pages counted, {living[id(file)]} found"
            )

    def _claim(self, file: PageFile) -> None:
        assert file.name not in self._hidden, f"{file.name} is claimed already"
        self._hidden[file.name] = file
        self._usage.add_bytes(file.domain, file.num_bytes)

    def _publish(self, file: PageFile) -> None:
        """Makes a claimed file findable as the last used file, even if other files were used while it was written."""
        del self._hidden[file.name]
        self._last_stamp_ns = file.used_at_ns = max(self._last_stamp_ns, file.used_at_ns)
        self._queues.setdefault(file.domain, OrderedDict())[file.name] = file
        for key in file.header.keys if file.header is not None else ():
            if key in self._locations:
                self._remove_location(self._locations[key], key)
            self._locations[key] = file
            file.num_live += 1

    def _same_digest(self, digest: bytes) -> bytes:
        if len(self._digests) > _MAX_DIGESTS:
            self._digests.clear()
        return self._digests.setdefault(digest, digest)

    def _remove_location(self, file: PageFile, key: PageKey) -> None:
        if self._locations.get(key) is file:
            del self._locations[key]
            file.num_live -= 1
            if not file.num_live:
                self._empty[file.name] = file

    def _new_stamp(self, now_ns: int) -> int:
        self._last_stamp_ns = max(self._last_stamp_ns + 1, now_ns)
        return self._last_stamp_ns
