"""Finds and reads the KV pages that other engines keep on a shared disk, and erases those of a domain.

    root / layout / slot-0     the folder of one engine: a DiskStore owns it, and only that engine writes there
                    slot-1     the folder of another engine of the same model, dtype and page layout

PeerPages reads every slot but its own. It knows what `refresh` has found, and never waits for another engine. A page
that its owner has removed since then is a page that is not found.

Only an erasure removes files of others: `forget_domain` and then `sweep` remove the files of a domain (usually one
tenant) from every slot of every layout, also of engines that have ended. A running owner takes a removed file for a lost
one. A file that its owner is writing meanwhile appears later: the owner forgets the domain itself.

Invariants: a read returns exactly the bytes that were written under a page's key, or nothing, because a file never
changes after it got its name, and each page is checked against the header's checksum. After `forget_domain`, no page of
the domain is found that was found before.
"""

import threading
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.file_format import DamagedFile, FileSpan, ForeignFile, PageFile
from graftwork.engine.kv.disk.files import DRAFT_SUFFIX, FaultTolerantFiles, FileEntry, LocalFiles
from graftwork.engine.kv.disk.index import NO_OBJECTS, DiskCounters, DiskIndex, DiskMonitor, ObjectFigures
from graftwork.engine.kv.disk.keyring import Keyring
from graftwork.engine.kv.disk.recovery import is_our_name, read_header
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import Clock

SLOT_PATTERN = "slot-*"
_NO_LIMIT = 1 << 62
_DRAFT_MAX_AGE_S = 600.0
"""An incomplete file that was begun so many seconds ago is left over from an engine that has ended."""


class PeerPages:
    """The pages in the slots of other engines. `holds` and the methods that forget may be called from any thread."""

    def __init__(self, root: Path, own_slot: Path, layout: bytes, clock: Clock, keyring: Keyring) -> None:
        """`own_slot` is the folder of this engine, below `root`. `layout` is the digest that the headers must have.
        `keyring` is that of the engine's own store.
        """
        self._root = root
        self._own_slot = own_slot
        self._layout = layout
        self._clock = clock
        self._keyring = keyring
        self._monitor = DiskMonitor(clock)
        self._files = FaultTolerantFiles(LocalFiles(root), self._monitor)
        self._indexes: dict[str, DiskIndex] = {}
        """By slot: where its pages are. Replaced as a whole, because any thread may iterate over it."""
        self._known: dict[str, dict[str, PageFile | None]] = {}
        """By slot and path below `root`: the files that were found. None for a file that cannot be used."""
        self._to_erase: Counter[bytes] = Counter()
        """How often each domain was forgotten whose files are not removed yet."""
        self._erasing = threading.Lock()
        """Held to change `_to_erase`, and never while a file is touched."""
        self._refreshing = threading.Lock()

    @property
    def counters(self) -> DiskCounters:
        return self._monitor.snapshot()

    @property
    def objects(self) -> ObjectFigures:
        """Nothing: a folder is no bucket."""
        return NO_OBJECTS

    @property
    def num_pages(self) -> int:
        """The number of pages that were found. A page in two slots counts twice."""
        return sum(index.num_pages for index in self._indexes.values())

    def holds(self, key: PageKey) -> bool:
        """Returns whether a page was found in the slot of another engine, without reading it. O(slots)."""
        return any(index.holds(key) for index in self._indexes.values())

    def refresh(self) -> None:
        """Looks for files that other engines have written or removed since the last call. Reads headers only."""
        with self._refreshing:
            slots = {self._name_of(slot): slot for slot in self._slots(self._own_slot.parent)}
            for name in self._known.keys() | slots.keys():
                found = self._listed(slots[name]) if name in slots else {}
                if found is not None:
                    self._update(self._known.setdefault(name, {}), found)

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Reads pages from the slot that has the longest prefix of `keys`, or from the next one if its files are damaged.

        `into` must have room for the pages of all keys. Returns how many pages were read correctly, from the first key on.
        The content of `into` after these pages is undefined. Forgets a file that has an error, and leaves it to its owner.
        """
        found = [spans for index in self._indexes.values() if (spans := index.spans(keys))]
        found.sort(key=lambda spans: sum(span.count for span in spans), reverse=True)
        done = next((got for spans in found if (got := self._read_spans(spans, len(keys), into.cast("B")))), 0)
        self._monitor.add("read", done)
        return done

    def _read_spans(self, spans: list[FileSpan], num_keys: int, space: memoryview) -> int:
        done = 0
        for span in spans:
            page_bytes = span.header.page_bytes
            assert len(space) == num_keys * page_bytes, f"a page has {page_bytes} bytes"
            got = self._read_span(span, space[done * page_bytes : (done + span.count) * page_bytes])
            done += got
            if got < span.count:
                self._lose(span.file)
                break
        return done

    def forget_plain(self, domain: bytes) -> int:
        """Does nothing: the owners remove their files."""
        return 0

    def offer(self, own: DiskStore, keys: Sequence[PageKey]) -> None:
        """Does nothing: the others read this engine's slot."""

    def close(self) -> None:
        """Does nothing: no file is open."""

    def forget(self, key: PageKey) -> None:
        """Forgets where a page is. Its owner keeps the page."""
        for index in self._indexes.values():
            index.forget(key)

    def forget_domain(self, domain: bytes) -> int:
        """Forgets all pages of a domain (usually one tenant), and has `sweep` remove their files.

        `domain` is the domain's digest. Returns the number of these pages.
        """
        with self._erasing:
            self._to_erase[domain] += 1  # before the index forgets: `_find` looks here after it has added a file
        return sum(index.forget_domain(domain) for index in self._indexes.values())

    def sweep(self) -> None:
        """Removes the files of forgotten domains from all slots but its own.

        A file that cannot be read or removed is tried again by the next call.
        """
        with self._refreshing:
            with self._erasing:
                asked = dict(self._to_erase)
            if asked and self._erase_everywhere(asked):
                with self._erasing:  # what was forgotten again meanwhile is left for the next call
                    self._to_erase -= Counter(asked)

    def check_integrity(self) -> None:
        """Checks the index, and that it has exactly the files that were found and can be used."""
        self._monitor.check_integrity()
        for slot, index in self._indexes.items():
            index.check_integrity()
            usable = {name for name, file in self._known[slot].items() if file is not None}
            assert index.names_holding(index.keys()) <= usable, "a page lies in a file that was not found"

    def _slots(self, layout_folder: Path) -> list[Path]:
        return [slot for slot in sorted(layout_folder.glob(SLOT_PATTERN)) if slot != self._own_slot]

    def _slots_of_all_layouts(self) -> list[Path]:
        return [slot for slot in sorted(self._root.glob(f"*/{SLOT_PATTERN}")) if slot != self._own_slot]

    def _name_of(self, slot: Path) -> str:
        return slot.relative_to(self._root).as_posix()

    def _listed(self, slot: Path) -> dict[str, FileEntry] | None:
        """Returns the files of a slot by their paths below the root: none if the slot is gone. None if the disk fails."""
        try:
            entries = LocalFiles(slot).entries()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self._monitor.record_failure(slot.name, error)
            return None
        prefix = self._name_of(slot)
        named = [replace(entry, name=f"{prefix}/{entry.name}") for entry in entries if is_our_name(entry.name)]
        return {entry.name: entry for entry in named}

    def _update(self, known: dict[str, PageFile | None], found: dict[str, FileEntry]) -> None:
        for name in known.keys() - found.keys():
            self._drop(name)
        for name in found.keys() - known.keys():
            self._find(name, found[name])

    def _find(self, name: str, entry: FileEntry) -> None:
        """Reads the header of a new file, and lets lookups find its pages. The next call tries again if the disk fails."""
        try:
            header = read_header(self._files, entry)
        except (DamagedFile, ForeignFile):
            self._known[_slot_of(name)][name] = None
            return
        if header is None:
            return
        slot, usable = _slot_of(name), header.layout == self._layout
        file = PageFile(name, entry.num_bytes, header, entry.used_at_ns) if usable else None
        self._known[slot][name] = file
        if file is not None:
            if slot not in self._indexes:
                self._indexes = {**self._indexes, slot: DiskIndex(_NO_LIMIT, keyring=self._keyring)}
            self._indexes[slot].add(file)
            if header.domain in self._to_erase:
                self._indexes[slot].forget_domain(header.domain)

    def _read_span(self, span: FileSpan, space: memoryview) -> int:
        num_bytes = self._files.read(span.file.name, span.header.page_offset(span.first), space) or 0
        return self._keyring.check(span, num_bytes, space).num_good

    def _lose(self, file: PageFile) -> None:
        """Forgets the pages of a file, until another file at its path is found."""
        with self._refreshing:
            known = self._known[_slot_of(file.name)]
            if known.get(file.name) is file:
                self._drop(file.name)
                known[file.name] = None

    def _drop(self, name: str) -> None:
        slot = _slot_of(name)
        file = self._known[slot].pop(name)
        if file is not None:
            index = self._indexes[slot]
            if index.retire(file):
                index.free(file)

    def _erase_everywhere(self, domains: Container[bytes]) -> bool:
        outcomes = [self._erase(slot, domains) for slot in self._slots_of_all_layouts()]
        return all(outcomes)

    def _erase(self, slot: Path, domains: Container[bytes]) -> bool:
        """Removes the files of domains from a slot, and those that may be of any domain. Returns whether all are gone."""
        listed = self._listed(slot)
        if listed is None:
            return False
        is_done = True
        for name, entry in listed.items():
            must_go = self._must_go(entry, domains)
            is_done &= must_go is not None and (not must_go or self._files.remove(name))
        return is_done

    def _must_go(self, entry: FileEntry, domains: Container[bytes]) -> bool | None:
        """Returns whether a file may be of a domain of `domains`; None if the disk fails.

        A damaged file and an abandoned draft may be. A draft that may still be written, and a file of another version,
        are left to their owners.
        """
        if entry.name.endswith(DRAFT_SUFFIX):
            return self._clock.now() - entry.used_at_ns / 1e9 > _DRAFT_MAX_AGE_S
        try:
            header = read_header(self._files, entry)
        except DamagedFile:
            return True
        except ForeignFile:
            return False
        return None if header is None else header.domain in domains


def _slot_of(name: str) -> str:
    """Returns the slot of a file. `name` is the file's path below the root."""
    return name.rpartition("/")[0]
