"""Tests the disk store when the disk fails: crashes, refused operations, damaged and foreign files."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from tests.engine.faulty_disk import (
    LAYOUT,
    ONE_PAGE_FILE,
    PAGE_BYTES,
    Crash,
    FaultyFiles,
    bytes_in,
    chain,
    opened,
    quick_folder,
    readable,
    store,
)

OPERATIONS = ["create", "rename", "remove", "read", "stamp", "sync"]


def work(disk: DiskStore) -> list[list[PageKey]]:
    """Writes three sequences that compete for room. Returns those that were reported as stored."""
    reported = []
    for scope, count in (("a", 5), ("b", 9), ("c", 5)):
        keys = chain(scope, count)
        if store(disk, "x", keys) == count:
            reported.append(keys)
    return reported


def open_and_work(disk: DiskStore) -> None:
    disk.open()
    work(disk)


def operations_of_work(folder: Path) -> int:
    files = FaultyFiles(folder)
    disk = opened(folder, 4 * ONE_PAGE_FILE, files=files)
    work(disk)
    disk.close()
    return files.num_operations


@pytest.fixture
def quick_path() -> Iterator[Path]:
    with quick_folder() as folder:
        yield Path(folder)


def test_a_crash_between_any_two_operations_leaves_a_folder_that_opens(quick_path: Path) -> None:
    """After a crash at any operation, all pages found are correct, the budget holds and no incomplete file is left."""
    num_operations = operations_of_work(quick_path / "whole")
    assert num_operations > 12

    for crash_at in range(num_operations):
        folder = quick_path / str(crash_at)
        files = FaultyFiles(folder)
        files.crash_at = crash_at
        disk = DiskStore(folder, 4 * ONE_PAGE_FILE, LAYOUT, files, ManualClock())
        with pytest.raises(Crash):
            open_and_work(disk)
        assert bytes_in(folder) <= 4 * ONE_PAGE_FILE
        disk.close()

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
    """Whichever operation fails, the store answers, and it works again when the disk does."""
    files = FaultyFiles(tmp_path)
    disk = opened(tmp_path, 4 * ONE_PAGE_FILE, files=files)
    store(disk, "x", chain("before", 1))

    files.refused = {operation}
    readable(disk, chain("before", 1))
    work(disk)
    files.refused = set()

    assert disk.counters.failed > 0
    assert work(disk)
    disk.check_integrity()


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    """If the folder cannot be listed, no budget can be kept, so the store does not open."""
    files = FaultyFiles(tmp_path)
    files.refused = {"entries"}

    with pytest.raises(InvalidRequest, match="cannot be listed"):
        opened(tmp_path, files=files)


def test_a_full_disk_stores_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """A write that meets ENOSPC reports no pages and leaves no file."""
    files = FaultyFiles(tmp_path)
    disk = opened(tmp_path, files=files)
    files.refused = {"create"}

    assert store(disk, "x", chain("a", 3)) == 0

    assert (disk.num_pages, disk.bytes_used, bytes_in(tmp_path)) == (0, 0, 0)


def test_failures_are_logged_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hundred failures write one log line, and another one a minute later."""
    files, clock = FaultyFiles(tmp_path), ManualClock()
    disk = DiskStore(tmp_path, 2**20, LAYOUT, files, clock)
    disk.open()
    files.refused = {"create"}

    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            store(disk, "x", chain("a", 1))
        clock.advance(61)
        store(disk, "x", chain("a", 1))

    totals: list[Any] = [getattr(record, "failed", None) for record in caplog.records]
    assert totals == [1, 101]


def test_damage_is_found_when_it_is_read(tmp_path: Path) -> None:
    """With a changed byte in the third page, two pages are read and the file is removed and counted."""
    disk = opened(tmp_path)
    keys = chain("a", 4)
    store(disk, "x", keys)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-2 * PAGE_BYTES + 5] ^= 1
    path.write_bytes(content)

    num_read = disk.read_pages(keys, memoryview(bytearray(4 * PAGE_BYTES)))

    assert (num_read, disk.counters.corrupt, disk.num_pages, bytes_in(tmp_path)) == (2, 1, 0, 0)


def test_damage_outlives_a_restart(tmp_path: Path) -> None:
    """A restart reads only the heads of files, so a changed byte of a page is found when the page is read."""
    disk = opened(tmp_path)
    keys = chain("a", 1)
    store(disk, "x", keys)
    disk.close()
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
    """A file that was cut off or extended while the store was closed is counted as corrupt and removed at the next
    start."""
    disk = opened(tmp_path)
    store(disk, "x", chain("a", 1))
    disk.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().ljust(num_bytes, b"x")[:num_bytes])

    again = opened(tmp_path)

    assert (again.num_pages, again.counters.corrupt, bytes_in(tmp_path)) == (0, 1, 0)


def test_a_renamed_file_answers_for_its_own_keys_only(tmp_path: Path) -> None:
    """A file copied over another one is found by its content, and each page is still checked."""
    disk = opened(tmp_path)
    store(disk, "x", chain("a", 1))
    store(disk, "x", chain("b", 1))
    disk.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    second.write_bytes(first.read_bytes())

    again = opened(tmp_path)

    assert readable(again, chain("a", 1)) == chain("a", 1)
    assert not again.holds(chain("b", 1)[0])
    assert bytes_in(tmp_path) == ONE_PAGE_FILE
    again.check_integrity()


def test_a_file_that_cannot_be_removed_stays_counted(tmp_path: Path) -> None:
    """Its pages are not found, its bytes stay counted, and its removal is tried again when room is needed."""
    files = FaultyFiles(tmp_path)
    disk = opened(tmp_path, 2 * ONE_PAGE_FILE, files=files)
    store(disk, "x", chain("a", 1))
    files.refused = {"remove"}
    disk.forget(chain("a", 1)[0])

    assert (disk.num_pages, disk.bytes_used) == (0, ONE_PAGE_FILE)
    assert store(disk, "x", chain("b", 1)) == 1
    assert store(disk, "x", chain("c", 1)) == 0
    files.refused = set()
    assert store(disk, "x", chain("c", 1)) == 1
    assert bytes_in(tmp_path) <= 2 * ONE_PAGE_FILE
    disk.check_integrity()
