"""The disk tier where the disk does not behave: crashes anywhere, refusals, damage, strangers' hands."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graftwork.engine.disk_tier import DiskTier
from graftwork.engine.page_key import PageKey
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from tests.engine.disk_lab import (
    LAYOUT,
    ONE_PAGE_FILE,
    OTHER_LAYOUT,
    PAGE_BYTES,
    Crash,
    FragileFiles,
    bytes_in,
    chain,
    opened,
    pages_of,
    party,
    quick_folder,
    readable,
    store,
)
from tests.hypothesis_profiles import examples

MAX_BYTES = 6 * ONE_PAGE_FILE
RUNS = [chain(scope, 5) for scope in "abcd"]
EVERY_KEY = [key for keys in RUNS for key in keys]
OPERATIONS = ["create", "rename", "remove", "read", "stamp", "sync"]
parts = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5))
shares = st.floats(0, 1, exclude_max=True)


def keys_of(part: tuple[int, int, int]) -> list[PageKey]:
    run, start, count = part
    return RUNS[run][start : start + count]


class DiskMachine(RuleBasedStateMachine):
    """Everything that can happen to a folder; what a page may be answered with is known from its key alone."""

    def __init__(self) -> None:
        super().__init__()
        self.place = quick_folder()
        self.folder = Path(self.place.name) / "kv"
        self.stored: set[PageKey] = set()
        """Reported as stored in this folder at some time."""
        self.written: set[bytes] = set()
        """The contents of all files that were written to this folder at some time."""

    @initialize()
    def open(self) -> None:
        self.files = FragileFiles(self.folder, self.written)
        self.tier = opened(self.folder, MAX_BYTES, files=self.files)
        # A restart reads the heads of files only, so a damaged page stays until it is read.
        self.is_damaged = any(path.read_bytes() not in self.written for path in self.folder.iterdir())
        self.was_refused = self.has_quotas = False
        self.limits: dict[str, int] = {}

    @property
    def is_sound(self) -> bool:
        """Whether the files are as they were written, and the disk has refused nothing since the folder was opened."""
        return not self.is_damaged and not self.was_refused

    @rule(part=parts, owner=st.sampled_from("xy"))
    def write(self, part: tuple[int, int, int], owner: str) -> None:
        keys = keys_of(part)
        is_held = [self.tier.holds(key) for key in keys]
        num_stored = store(self.tier, owner, keys)
        self.stored |= set(keys)
        if self.is_sound:
            stays = [key for key, was_held in zip(keys, is_held, strict=True) if was_held]
            news = [key for key, was_held in zip(keys, is_held, strict=True) if not was_held]
            assert all(map(self.tier.holds, stays + news[:num_stored]))
            assert not any(map(self.tier.holds, news[num_stored:]))
            assert num_stored > 0 or not news or self.has_quotas or stays
            assert num_stored == 0 or self.tier.bytes_of(party(owner)) <= self.limits.get(owner, MAX_BYTES)

    @rule(part=parts)
    def read(self, part: tuple[int, int, int]) -> None:
        keys = keys_of(part)
        held = [self.tier.holds(key) for key in keys]
        space = bytearray(len(keys) * PAGE_BYTES)
        num_read = self.tier.read_run(keys, memoryview(space))
        assert bytes(space[: num_read * PAGE_BYTES]) == b"".join(pages_of(keys[:num_read]))
        assert num_read <= [*held, False].index(False)
        if self.is_sound:
            assert num_read == [*held, False].index(False)

    @rule(key=st.sampled_from(EVERY_KEY))
    def forget(self, key: PageKey) -> None:
        self.tier.forget(key)
        assert not self.tier.holds(key)

    @rule(owner=st.sampled_from("xy"))
    def forget_owner(self, owner: str) -> None:
        held = self.tier.num_pages
        assert self.tier.forget_owner(party(owner)) == held - self.tier.num_pages

    @rule()
    def sweep(self) -> None:
        self.tier.sweep()
        if self.is_sound:
            assert bytes_in(self.folder) == self.tier.bytes_used

    @rule(owner=st.sampled_from("xy"), limit=st.integers(0, MAX_BYTES), reserve=st.integers(0, MAX_BYTES))
    def set_quota(self, owner: str, limit: int, reserve: int) -> None:
        self.tier.set_limit(party(owner), limit)
        self.tier.set_reserve(party(owner), reserve)
        self.limits[owner] = limit
        self.has_quotas = True

    @rule()
    def enforce_limits(self) -> None:
        self.tier.enforce_limits()
        if self.is_sound:
            assert all(self.tier.bytes_of(party(owner)) <= limit for owner, limit in self.limits.items())

    @rule(refused=st.sets(st.sampled_from(OPERATIONS), max_size=3))
    def refuse(self, refused: set[str]) -> None:
        self.files.refused = refused
        self.was_refused |= bool(refused)

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()

    @rule(after=st.integers(0, 6), part=parts)
    def crash(self, after: int, part: tuple[int, int, int]) -> None:
        self.files.crash_at = self.files.num_operations + after
        self.stored |= set(keys_of(part))
        try:
            store(self.tier, "x", keys_of(part))
            readable(self.tier, EVERY_KEY)
        except Crash:
            pass
        self.restart()

    @precondition(lambda self: any(self.folder.iterdir()))
    @rule(which=shares, where=shares, bit=st.integers(0, 7))
    def flip_a_bit(self, which: float, where: float, bit: int) -> None:
        path = self._pick(which)
        content = bytearray(path.read_bytes())
        if content:
            content[int(where * len(content))] ^= 1 << bit
        path.write_bytes(content)
        self.is_damaged = True

    @precondition(lambda self: any(self.folder.iterdir()))
    @rule(which=shares, where=shares)
    def cut_off(self, which: float, where: float) -> None:
        path = self._pick(which)
        path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])
        self.is_damaged = True

    @precondition(lambda self: any(self.folder.iterdir()))
    @rule(which=shares, other=shares)
    def swap(self, which: float, other: float) -> None:
        first, second = self._pick(which), self._pick(other)
        contents = first.read_bytes(), second.read_bytes()
        if len(contents[0]) == len(contents[1]):  # nobody can count bytes that others add
            second.write_bytes(contents[0])
            first.write_bytes(contents[1])
            self.is_damaged = True

    @precondition(lambda self: any(self.folder.iterdir()))
    @rule(which=shares)
    def remove(self, which: float) -> None:
        self._pick(which).unlink()
        self.is_damaged = True

    @rule(part=parts)
    def serve_another_layout(self, part: tuple[int, int, int]) -> None:
        self.tier.close()
        other = opened(self.folder, MAX_BYTES, OTHER_LAYOUT, FragileFiles(self.folder, self.written))
        store(other, "x", RUNS[part[0]][: part[2]])
        other.close()
        self.open()

    @invariant()
    def the_budget_holds(self) -> None:
        assert max(self.files.most_bytes, bytes_in(self.folder)) <= MAX_BYTES

    @invariant()
    def the_counts_are_right(self) -> None:
        refused, self.files.refused = self.files.refused, set()
        self.tier.check_integrity()
        self.files.refused = refused
        assert all(key in self.stored for key in EVERY_KEY if self.tier.holds(key))

    def teardown(self) -> None:
        self.files.refused = set()
        readable(self.tier, EVERY_KEY)
        self.tier.close()
        again = opened(self.folder, MAX_BYTES)
        assert set(readable(again, EVERY_KEY)) <= self.stored
        again.check_integrity()
        again.close()
        self.place.cleanup()

    def _pick(self, which: float) -> Path:
        paths = sorted(self.folder.iterdir())
        return paths[int(which * len(paths))]


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=examples(150), stateful_step_count=30)


def work(tier: DiskTier) -> list[list[PageKey]]:
    """Three runs that need each other's room; returns those that were reported as stored."""
    reported = []
    for scope, count in (("a", 5), ("b", 9), ("c", 5)):
        keys = chain(scope, count)
        if store(tier, "x", keys) == count:
            reported.append(keys)
    return reported


def open_and_work(tier: DiskTier) -> None:
    tier.open()
    work(tier)


def operations_of_work(folder: Path) -> int:
    files = FragileFiles(folder)
    tier = opened(folder, 4 * ONE_PAGE_FILE, files=files)
    work(tier)
    tier.close()
    return files.num_operations


@pytest.fixture
def quick_path() -> Iterator[Path]:
    with quick_folder() as folder:
        yield Path(folder)


def test_a_crash_between_any_two_operations_leaves_a_folder_that_opens(quick_path: Path) -> None:
    """At each point in turn: what is found is right, nothing is above the budget, and nothing half is left."""
    num_operations = operations_of_work(quick_path / "whole")
    assert num_operations > 12

    for crash_at in range(num_operations):
        folder = quick_path / str(crash_at)
        files = FragileFiles(folder)
        files.crash_at = crash_at
        tier = DiskTier(folder, 4 * ONE_PAGE_FILE, LAYOUT, files, ManualClock())
        with pytest.raises(Crash):
            open_and_work(tier)
        assert bytes_in(folder) <= 4 * ONE_PAGE_FILE
        tier.close()

        again = opened(folder, 4 * ONE_PAGE_FILE)
        keys = [key for scope in "abc" for key in chain(scope, 9)]
        assert readable(again, keys) == [key for key in keys if again.holds(key)]
        assert again.counters.corrupt == 0
        assert all(path.suffix == ".kvpages" for path in folder.iterdir())
        again.check_integrity()
        assert work(again)
        again.close()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_disk_that_refuses_is_counted_and_never_raises(tmp_path: Path, operation: str) -> None:
    """Whichever operation fails, the tier answers, and works as before once the disk does."""
    files = FragileFiles(tmp_path)
    tier = opened(tmp_path, 4 * ONE_PAGE_FILE, files=files)
    store(tier, "x", chain("before", 1))

    files.refused = {operation}
    readable(tier, chain("before", 1))
    work(tier)
    files.refused = set()

    assert tier.counters.failed > 0
    assert work(tier)
    tier.check_integrity()


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    """Without knowing what is there no budget can be kept, so the engine does not start on it."""
    files = FragileFiles(tmp_path)
    files.refused = {"entries"}

    with pytest.raises(InvalidRequest, match="cannot be listed"):
        opened(tmp_path, files=files)


def test_a_full_disk_stores_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """A write that meets ENOSPC reports no pages, and its half file is gone."""
    files = FragileFiles(tmp_path)
    tier = opened(tmp_path, files=files)
    files.refused = {"create"}

    assert store(tier, "x", chain("a", 3)) == 0

    assert (tier.num_pages, tier.bytes_used, bytes_in(tmp_path)) == (0, 0, 0)


def test_failures_are_logged_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that fails a hundred times is one line, and another one a minute later."""
    files, clock = FragileFiles(tmp_path), ManualClock()
    tier = DiskTier(tmp_path, 2**20, LAYOUT, files, clock)
    tier.open()
    files.refused = {"create"}

    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            store(tier, "x", chain("a", 1))
        clock.advance(61)
        store(tier, "x", chain("a", 1))

    totals: list[Any] = [getattr(record, "failed", None) for record in caplog.records]
    assert totals == [1, 101]


def test_damage_is_found_when_it_is_read(tmp_path: Path) -> None:
    """One changed byte in the third page: two pages are read, the file is dropped and counted."""
    tier = opened(tmp_path)
    keys = chain("a", 4)
    store(tier, "x", keys)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-2 * PAGE_BYTES + 5] ^= 1
    path.write_bytes(content)

    num_read = tier.read_run(keys, memoryview(bytearray(4 * PAGE_BYTES)))

    assert (num_read, tier.counters.corrupt, tier.num_pages, bytes_in(tmp_path)) == (2, 1, 0, 0)


def test_damage_outlives_a_restart(tmp_path: Path) -> None:
    """A restart reads the heads of files alone, so a changed byte of a page is found when the page is read."""
    tier = opened(tmp_path)
    keys = chain("a", 1)
    store(tier, "x", keys)
    tier.close()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    again = opened(tmp_path)

    assert (again.num_pages, again.counters.corrupt) == (1, 0)
    assert readable(again, keys) == []
    assert (again.num_pages, again.counters.corrupt) == (0, 1)


@pytest.mark.parametrize("num_bytes", [100, ONE_PAGE_FILE - 1, ONE_PAGE_FILE + 1])
def test_a_file_of_the_wrong_length_is_not_found_after_a_restart(tmp_path: Path, num_bytes: int) -> None:
    """Cut off or grown while nobody looked: it is counted as corrupt and gone before any page of it is asked for."""
    tier = opened(tmp_path)
    store(tier, "x", chain("a", 1))
    tier.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().ljust(num_bytes, b"x")[:num_bytes])

    again = opened(tmp_path)

    assert (again.num_pages, again.counters.corrupt, bytes_in(tmp_path)) == (0, 1, 0)


def test_a_file_of_pages_under_anothers_name_answers_for_its_own_keys_only(tmp_path: Path) -> None:
    """A file copied over another is found by what it holds, and each page is still checked."""
    tier = opened(tmp_path)
    store(tier, "x", chain("a", 1))
    store(tier, "x", chain("b", 1))
    tier.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    second.write_bytes(first.read_bytes())

    again = opened(tmp_path)

    assert readable(again, chain("a", 1)) == chain("a", 1)
    assert not again.holds(chain("b", 1)[0])
    assert bytes_in(tmp_path) == ONE_PAGE_FILE
    again.check_integrity()


def test_a_file_that_cannot_be_removed_stays_counted(tmp_path: Path) -> None:
    """Its pages are gone from the index, its bytes are not, and it is tried again when room is needed."""
    files = FragileFiles(tmp_path)
    tier = opened(tmp_path, 2 * ONE_PAGE_FILE, files=files)
    store(tier, "x", chain("a", 1))
    files.refused = {"remove"}
    tier.forget(chain("a", 1)[0])

    assert (tier.num_pages, tier.bytes_used) == (0, ONE_PAGE_FILE)
    assert store(tier, "x", chain("b", 1)) == 1
    assert store(tier, "x", chain("c", 1)) == 0
    files.refused = set()
    assert store(tier, "x", chain("c", 1)) == 1
    assert bytes_in(tmp_path) <= 2 * ONE_PAGE_FILE
    tier.check_integrity()
