"""Engines that read each other's pages in a shared folder: damage, crashes, erasure, and random histories."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.file_format import decode_header
from graftwork.engine.kv.disk.files import FileEntry, LocalFiles
from graftwork.engine.kv.disk.shared import SharedStore, take_slot
from tests.engine.faulty_disk import (
    LAYOUT,
    ONE_PAGE_FILE,
    OTHER_LAYOUT,
    PAGE_BYTES,
    chain,
    domain_named,
    page_of,
    pages_of,
    quick_folder,
)
from tests.hypothesis_profiles import examples

KEYS = chain("s", 6)


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_folder() as place:
        yield Path(place)


def taken(root: Path, layout: bytes = LAYOUT, max_bytes: int = 2**20) -> SharedStore:
    """Returns an engine's store, which looks at others only when `refresh` is called."""
    store = take_slot(root, max_bytes, layout)
    store.refresh()
    return store


def write(store: SharedStore, keys: list[PageKey], domain: str = "x") -> int:
    return store.write(domain_named(domain), keys, pages_of(keys))


def read(store: SharedStore, keys: list[PageKey]) -> list[PageKey]:
    """Returns the keys of the longest prefix that can be read. Fails if a page has wrong bytes."""
    space = bytearray(PAGE_BYTES * len(keys))
    count = store.read_pages(keys, memoryview(space))
    for number, key in enumerate(keys[:count]):
        assert bytes(space[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]) == page_of(key), "wrong bytes"
    return keys[:count]


def kill(store: SharedStore) -> None:
    """Ends an engine as a crash does: the system frees its lock, and nothing else happens."""
    store.own.close()


def page_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/slot-*/*.kvpages"))


def test_an_engine_reads_what_another_has_written_and_goes_on_in_its_own_slot(root: Path) -> None:
    """A run of pages over two slots is read as one, and each engine writes to its own slot only."""
    first, second = taken(root), taken(root)
    write(first, KEYS[:3])
    assert not second.holds(KEYS[0])

    second.refresh()
    write(second, KEYS[3:])

    assert read(second, KEYS) == KEYS
    assert (first.num_pages, second.num_pages) == (3, 3)
    second.refresh()
    assert second.peers.num_pages == 3
    assert read(first, KEYS) == KEYS[:3]


def test_engines_of_other_layouts_do_not_see_the_pages(root: Path) -> None:
    """An engine with another layout finds nothing, even if a file of this layout lies in a slot of its own layout."""
    first, other = taken(root), taken(root, OTHER_LAYOUT)
    write(first, KEYS)
    stranger = root / OTHER_LAYOUT.hex()[:32] / "slot-7"
    stranger.mkdir()
    (file,) = page_files(root)
    (stranger / file.name).write_bytes(file.read_bytes())

    other.refresh()

    assert not any(map(other.holds, KEYS))
    assert read(other, KEYS) == []


def test_a_dead_engines_pages_are_read_and_its_slot_is_taken_over(root: Path) -> None:
    """Others read the pages of an engine that has crashed; the next engine takes its slot and its pages."""
    first, second = taken(root), taken(root)
    write(first, KEYS)
    kill(first)

    second.refresh()
    successor = taken(root)

    assert read(second, KEYS) == KEYS
    assert successor.num_pages == len(KEYS)
    assert len(list(root.glob("*/slot-*"))) == 2


def test_a_page_that_its_owner_removes_is_not_found(root: Path) -> None:
    """After an eviction by the owner, a read finds nothing, and the next refresh forgets the pages."""
    first, second = taken(root), taken(root)
    write(first, KEYS)
    second.refresh()
    first.own.set_limit(domain_named("x"), 0)
    first.enforce_limits()

    assert second.holds(KEYS[0])
    assert read(second, KEYS) == []
    second.refresh()
    assert not second.holds(KEYS[0])
    second.check_integrity()


@pytest.mark.parametrize("change", ["flip", "cut", "grow", "header", "empty"])
def test_a_damaged_file_of_another_engine_is_left_alone_and_never_answered(root: Path, change: str) -> None:
    """Whatever was changed in a file, no wrong byte is read, and the file stays for its owner to judge."""
    first, second = taken(root), taken(root)
    write(first, KEYS)
    (file,) = page_files(root)
    content = bytearray(file.read_bytes())
    if change == "flip":
        content[-PAGE_BYTES * 4] ^= 1
    elif change == "header":
        content[30] ^= 1
    second.refresh()
    changed = {"cut": content[:-1], "grow": content + b"\0", "empty": bytearray()}
    file.write_bytes(changed.get(change, content))

    for store in (second, taken(root)):
        assert set(read(store, KEYS)) <= set(KEYS)
        if change in ("flip", "empty"):
            assert read(store, KEYS[2:3]) == []
        store.check_integrity()
    assert file.exists()


def test_erasing_a_domain_reaches_every_slot_of_every_layout(root: Path) -> None:
    """After one engine has forgotten a domain, no slot has a file of it: of a running engine, of a dead one, or of
    another layout. Files of other domains stay, and owners take the loss for an eviction.
    """
    first, second, other, dead = taken(root), taken(root), taken(root, OTHER_LAYOUT), taken(root)
    for store, scope in ((first, "a"), (other, "b"), (dead, "c")):
        write(store, chain(scope, 2), "gone")
        write(store, chain(scope + "stays", 2), "stays")
    kill(dead)
    second.refresh()

    num_forgotten = second.forget_domain(domain_named("gone"))
    second.sweep()

    domains = [decode_header(file.read_bytes()).domain for file in page_files(root)]
    assert num_forgotten == 4
    assert domains == [domain_named("stays")] * 3
    assert not second.holds(chain("a", 1)[0])
    assert read(first, chain("a", 2)) == []
    assert read(first, chain("astays", 2)) == chain("astays", 2)
    for store in (first, second, other):
        store.check_integrity()


def test_a_file_that_cannot_be_removed_is_erased_later(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the file is gone its pages are not found, and the next sweep removes it."""
    first, second = taken(root), taken(root)
    write(first, KEYS, "gone")
    second.refresh()
    second.forget_domain(domain_named("gone"))

    def fail(files: LocalFiles, name: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(LocalFiles, "remove", fail)
    write(first, chain("later", 2), "gone")
    second.refresh()
    assert len(page_files(root)) == 2
    assert not second.holds(KEYS[0])
    assert not second.holds(chain("later", 1)[0])

    monkeypatch.undo()
    second.refresh()

    assert page_files(root) == []


def test_a_slot_that_cannot_be_listed_keeps_its_pages_and_is_erased_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk fails, nothing is taken for removed, and an erasure is not taken for done."""
    first, second = taken(root), taken(root)
    write(first, KEYS[:2], "gone")
    write(first, KEYS[2:], "stays")
    second.refresh()

    def fail(files: LocalFiles) -> list[FileEntry]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalFiles, "entries", fail)
    second.refresh()
    assert read(second, KEYS) == KEYS
    second.forget_domain(domain_named("gone"))
    second.sweep()
    monkeypatch.undo()
    second.sweep()

    assert [decode_header(file.read_bytes()).domain for file in page_files(root)] == [domain_named("stays")]


def test_erasing_removes_incomplete_files_that_a_dead_engine_has_left(root: Path) -> None:
    """A file that was begun an hour ago and never finished is removed; one that is being written stays."""
    first, second = taken(root), taken(root)
    write(first, KEYS)
    (file,) = page_files(root)
    for name, age_s in (("0", 3600), ("1", 0)):
        draft = file.with_name(file.name.replace(file.name[0], name, 1) + ".part")
        draft.write_bytes(b"half")
        stamp = file.stat().st_mtime_ns - age_s * 10**9
        os.utime(draft, ns=(stamp, stamp))

    second.forget_domain(domain_named("somebody"))
    second.sweep()

    assert [path.name[0] for path in root.glob("*/slot-*/*.part")] == ["1"]


SCOPES = "abc"
RUNS = {scope: chain(scope, 4) for scope in SCOPES}
EVERY_KEY = [key for keys in RUNS.values() for key in keys]
engines = st.integers(0, 2)
scopes = st.sampled_from(SCOPES)


class SharedMachine(RuleBasedStateMachine):
    """Three engines on one folder. The reference is the folder itself, read file by file after each step.

    A scope belongs to the domain of its name. An engine may be killed at any time; its successor takes a free slot.
    """

    @initialize()
    def begin(self) -> None:
        self.place = quick_folder()
        self.root = Path(self.place.name)
        self.engines = [taken(self.root, max_bytes=5 * ONE_PAGE_FILE) for _ in range(3)]
        self.forgotten: set[PageKey] = set()
        """Pages that an engine has forgotten at some time: an older copy of them may lie in its files."""

    @rule(engine=engines, scope=scopes, start=st.integers(0, 3), count=st.integers(1, 4))
    def write(self, engine: int, scope: str, start: int, count: int) -> None:
        write(self.engines[engine], RUNS[scope][start : start + count], scope)

    @rule(engine=engines)
    def refresh(self, engine: int) -> None:
        """After a refresh an engine finds every page that lies in a good file, except those that it forgot."""
        store = self.engines[engine]
        store.refresh()
        there = set(self._keys_in_files())
        found = {key for key in EVERY_KEY if store.holds(key)}
        assert found <= there | {key for key in EVERY_KEY if store.own.holds(key)}
        assert found >= there - self.forgotten

    @rule(engine=engines, scope=scopes, start=st.integers(0, 3))
    def read(self, engine: int, scope: str, start: int) -> None:
        read(self.engines[engine], RUNS[scope][start:])

    @rule(engine=engines, scope=scopes, number=st.integers(0, 3))
    def forget(self, engine: int, scope: str, number: int) -> None:
        self.engines[engine].forget(RUNS[scope][number])
        self.engines[engine].sweep()
        self.forgotten.add(RUNS[scope][number])
        assert not self.engines[engine].own.holds(RUNS[scope][number])

    @rule(engine=engines)
    def kill(self, engine: int) -> None:
        kill(self.engines[engine])
        self.engines[engine] = taken(self.root, max_bytes=5 * ONE_PAGE_FILE)

    @rule(engine=engines, scope=scopes, is_draft=st.booleans(), share=st.floats(0, 1, exclude_max=True))
    def kill_during_a_write(self, engine: int, scope: str, is_draft: bool, share: float) -> None:
        """A part of a file stays behind, under its draft's name or, after a power cut, under its own."""
        store = self.engines[engine]
        before = set(page_files(self.root))
        write(store, RUNS[scope], scope)
        new = sorted(set(page_files(self.root)) - before)
        kill(store)
        for path in new:
            content = path.read_bytes()
            path.unlink()
            path.with_name(path.name + ".part" * is_draft).write_bytes(content[: int(len(content) * share)])
        for other in self.engines:
            if other is not store:
                other.refresh()
                for keys in RUNS.values():
                    read(other, keys)
        self.engines[engine] = taken(self.root, max_bytes=5 * ONE_PAGE_FILE)

    @rule(scope=scopes, engine=engines)
    def erase(self, scope: str, engine: int) -> None:
        """One engine's erasure removes every file of the domain, whoever wrote it."""
        self.engines[engine].forget_domain(domain_named(scope))
        assert not any(map(self.engines[engine].holds, RUNS[scope]))
        self.engines[engine].sweep()
        assert not set(self._keys_in_files()) & set(RUNS[scope])

    @rule(engine=engines, choice=st.integers(0, 99))
    def lose_a_file(self, engine: int, choice: int) -> None:
        files = page_files(self.root)
        if files:
            files[choice % len(files)].unlink()

    @invariant()
    def everything_adds_up(self) -> None:
        for store in getattr(self, "engines", []):
            store.check_integrity()
            for keys in RUNS.values():
                read(store, keys)

    def _keys_in_files(self) -> list[PageKey]:
        headers = [decode_header(path.read_bytes()) for path in page_files(self.root)]
        return [key for header in headers for key in header.keys]

    def teardown(self) -> None:
        for store in getattr(self, "engines", []):
            store.close()
        self.place.cleanup()


TestSharedMachine = SharedMachine.TestCase
TestSharedMachine.settings = settings(max_examples=examples(40), stateful_step_count=25)
