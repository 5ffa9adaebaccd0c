"""Tests the disk store on a disk that works: what is kept, what is evicted, what a restart finds."""

import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.kv.disk.file_format import file_bytes
from graftwork.platform.errors import InvalidRequest
from tests.engine.faulty_disk import (
    LAYOUT,
    ONE_PAGE_FILE,
    OTHER_LAYOUT,
    PAGE_BYTES,
    FaultyFiles,
    bytes_in,
    chain,
    domain_named,
    opened,
    page_of,
    pages_of,
    quick_folder,
    readable,
    store,
)
from tests.hypothesis_profiles import examples


def test_pages_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Pages written in two calls are read in one, up to the first missing one."""
    disk = opened(tmp_path)
    keys = chain("a", 6)
    store(disk, "x", keys[:2])
    store(disk, "x", keys[2:5])
    space = bytearray(6 * PAGE_BYTES)

    num_read = disk.read_pages(keys, memoryview(space))

    assert num_read == 5
    assert bytes(space[: 5 * PAGE_BYTES]) == b"".join(pages_of(keys[:5]))
    assert disk.counters.read == 5
    disk.check_integrity()


def test_stored_pages_are_not_written_again(tmp_path: Path) -> None:
    """A longer write adds only the new pages, and a page given twice is written once."""
    disk = opened(tmp_path)
    keys = chain("a", 4)
    store(disk, "x", keys[:2])

    assert store(disk, "y", [*keys, keys[3]]) == 2
    assert disk.num_pages == 4
    assert disk.bytes_of(domain_named("y")) == file_bytes(2, PAGE_BYTES)


def test_a_restart_finds_all_pages_in_order_of_use(tmp_path: Path) -> None:
    """After a restart all pages are correct, and the least recently used ones are evicted first."""
    first = opened(tmp_path)
    old, used, new = chain("old", 1), chain("used", 1), chain("new", 1)
    for keys in (used, old, new):
        store(first, "x", keys)
    readable(first, used)
    first.close()

    disk = opened(tmp_path, max_bytes=3 * ONE_PAGE_FILE)
    assert readable(disk, []) == []
    store(disk, "x", chain("newest", 1))

    assert [disk.holds(keys[0]) for keys in (old, used, new)] == [False, True, True]
    assert readable(disk, [*used, *new]) == [*used, *new]
    disk.check_integrity()


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path) -> None:
    """A folder that is over its budget when it is opened loses its least recently used files."""
    first = opened(tmp_path)
    for number in range(6):
        store(first, "x", chain(str(number), 1))
    first.close()

    disk = opened(tmp_path, max_bytes=2 * ONE_PAGE_FILE)

    assert bytes_in(tmp_path) <= 2 * ONE_PAGE_FILE
    assert [disk.holds(chain(str(number), 1)[0]) for number in range(6)] == [False] * 4 + [True] * 2
    assert disk.counters.evicted == 4


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["write", "read", "touch"]), st.integers(0, 7)), max_size=40))
def test_eviction_is_least_recently_used(steps: list[tuple[str, int]]) -> None:
    """With files of one page, the disk holds the same pages as an ordered dictionary of the same size."""
    model: OrderedDict[int, None] = OrderedDict()
    with quick_folder() as folder:
        disk = opened(Path(folder), max_bytes=4 * ONE_PAGE_FILE)
        keys = [chain(str(number), 1) for number in range(8)]
        for step, number in steps:
            if step == "write" and number not in model:
                store(disk, "x", keys[number])
                model[number] = None
                if len(model) > 4:
                    model.popitem(last=False)
            elif step == "read":
                assert readable(disk, keys[number]) == (keys[number] if number in model else [])
            elif step == "touch":
                disk.touch(keys[number])
            if step != "write" and number in model:
                model.move_to_end(number)
        disk.close()

    assert [number for number in range(8) if disk.holds(keys[number][0])] == sorted(model)


def test_the_last_pages_of_a_write_are_evicted_first(tmp_path: Path) -> None:
    """A write of several files loses its last pages first, because later pages are worthless without earlier ones."""
    disk = opened(tmp_path, max_bytes=5 * ONE_PAGE_FILE)
    keys = chain("long", 8)
    assert store(disk, "x", keys) == 8

    for number in range(2):
        store(disk, "x", chain(str(number), 1))

    held = [disk.holds(key) for key in keys]
    assert held == sorted(held, reverse=True)
    assert 0 < sum(held) < 8


def test_a_write_does_not_evict_its_own_pages(tmp_path: Path) -> None:
    """Of a write that is larger than the budget, the first pages are kept."""
    disk = opened(tmp_path, max_bytes=3 * ONE_PAGE_FILE)
    keys = chain("long", 9)

    num_stored = store(disk, "x", keys)

    assert 0 < num_stored < 9
    assert readable(disk, keys) == keys[:num_stored]
    assert store(disk, "x", keys) == 0


def test_the_budget_holds_even_while_a_file_is_written(tmp_path: Path) -> None:
    """The folder never exceeds its budget, because room is made before it is used."""
    files = FaultyFiles(tmp_path)
    disk = opened(tmp_path, max_bytes=5 * ONE_PAGE_FILE, files=files)

    for number in range(30):
        store(disk, "x", chain(str(number), 1 + number % 3))

    assert 3 * ONE_PAGE_FILE < files.most_bytes <= 5 * ONE_PAGE_FILE


def test_a_forgotten_page_is_not_answered(tmp_path: Path) -> None:
    """The other pages of a file are still answered; the file goes with its last page."""
    disk = opened(tmp_path)
    keys = chain("a", 2)
    store(disk, "x", keys)

    disk.forget(keys[0])

    assert readable(disk, keys) == [keys[1]]
    disk.forget(keys[1])
    disk.sweep()
    assert (disk.bytes_used, bytes_in(tmp_path)) == (0, 0)


def test_a_forgotten_domain_leaves_nothing(tmp_path: Path) -> None:
    """All files of the forgotten domain are removed, and no other file."""
    disk = opened(tmp_path)
    store(disk, "x", chain("a", 3))
    store(disk, "x", chain("b", 1))
    store(disk, "y", chain("c", 1))

    assert disk.forget_domain(domain_named("x")) == 4
    assert readable(disk, [*chain("a", 3), *chain("b", 1)]) == []
    disk.sweep()
    assert bytes_in(tmp_path) == disk.bytes_used == ONE_PAGE_FILE


def test_forgetting_touches_no_file(tmp_path: Path) -> None:
    """Forgotten files are removed by the next sweep or before the next write, so the engine's loop never waits for the
    disk."""
    files = FaultyFiles(tmp_path)
    disk = opened(tmp_path, max_bytes=3 * ONE_PAGE_FILE, files=files)
    for scope in "abc":
        store(disk, "x", chain(scope, 1))
    before = files.num_operations

    disk.forget(chain("a", 1)[0])
    disk.forget_domain(domain_named("x"))

    assert (files.num_operations, disk.num_pages, bytes_in(tmp_path)) == (before, 0, 3 * ONE_PAGE_FILE)
    disk.check_integrity()
    assert store(disk, "x", chain("d", 1)) == 1
    assert (disk.counters.evicted, bytes_in(tmp_path)) == (0, ONE_PAGE_FILE)
    disk.check_integrity()


def test_pages_of_another_layout_are_ignored_and_kept(tmp_path: Path) -> None:
    """Files of another layout are not answered and count as foreign; their own engine finds them again until room is
    needed."""
    other = opened(tmp_path, layout=OTHER_LAYOUT)
    keys = chain("a", 1)
    store(other, "x", keys)
    other.close()

    disk = opened(tmp_path, max_bytes=2 * ONE_PAGE_FILE)

    assert (disk.holds(keys[0]), disk.counters.foreign, disk.bytes_used) == (False, 1, ONE_PAGE_FILE)
    store(disk, "x", chain("b", 1))
    disk.close()
    again = opened(tmp_path, layout=OTHER_LAYOUT)
    assert readable(again, keys) == keys
    again.close()
    full = opened(tmp_path, max_bytes=2 * ONE_PAGE_FILE)
    store(full, "x", [*chain("c", 1)])
    store(full, "x", [*chain("d", 1)])
    full.close()
    assert not opened(tmp_path, layout=OTHER_LAYOUT).holds(keys[0])


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    """Files with other names count as foreign, use no budget and stay."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()

    disk = opened(tmp_path, max_bytes=0)

    assert store(disk, "x", chain("a", 1)) == 0
    assert (disk.counters.foreign, disk.bytes_used) == (1, 0)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_has_one_engine(tmp_path: Path) -> None:
    """A second store on the same folder is refused until the first releases it."""
    first = opened(tmp_path)

    with pytest.raises(InvalidRequest, match="give each its own"):
        opened(tmp_path)

    first.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """If the path contains a file, the message names the folder."""
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidRequest, match="file/below"):
        opened(tmp_path / "file" / "below")


def test_only_the_owner_can_read_the_pages(tmp_path: Path) -> None:
    """Other users can read neither the folder nor any file."""
    disk = opened(tmp_path / "kv")
    store(disk, "x", chain("a", 1))

    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "kv").iterdir())


def test_readers_beside_an_evicting_writer_see_right_bytes_or_none(tmp_path: Path) -> None:
    """While a writer evicts, readers only ever read the bytes that belong to a key."""
    disk = opened(tmp_path, max_bytes=6 * ONE_PAGE_FILE)
    runs = [chain(str(number), 2) for number in range(60)]
    is_over = threading.Event()
    wrong: list[str] = []
    num_read = [0, 0]

    def read_all(reader: int) -> None:
        while not is_over.is_set():
            for keys in runs:
                space = bytearray(2 * PAGE_BYTES)
                count = disk.read_pages(keys, memoryview(space))
                num_read[reader] += count
                if bytes(space[: count * PAGE_BYTES]) != b"".join(pages_of(keys[:count])):
                    wrong.append(keys[0].hex())

    readers = [threading.Thread(target=read_all, args=(reader,)) for reader in range(2)]
    for thread in readers:
        thread.start()
    for keys in runs * 3:
        store(disk, "x", keys)
    is_over.set()
    for thread in readers:
        thread.join()

    assert wrong == []
    assert sum(num_read) > 0
    assert (disk.counters.corrupt, disk.counters.failed) == (0, 0)
    disk.check_integrity()


WRITER = """
import itertools, sys
from pathlib import Path
from tests.engine.faulty_disk import chain, opened, store
disk = opened(Path(sys.argv[1]), max_bytes=2**30)
for number in itertools.count():
    store(disk, "x", chain(str(number), 3))
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_lines", [1, 7, 40])
def test_a_killed_engine_loses_nothing_that_it_had_stored(tmp_path: Path, num_lines: int) -> None:
    """After SIGKILL, every write that was reported is there and correct."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        stored = [int(child.stdout.readline()) for _ in range(num_lines)]
        child.kill()
        child.wait()

    disk = opened(tmp_path, max_bytes=2**30)

    keys = [key for number in stored for key in chain(str(number), 3)]
    assert len(keys) == 3 * num_lines
    assert readable(disk, keys) == keys
    assert disk.counters.corrupt == 0
    assert bytes_in(tmp_path) == disk.bytes_used
    disk.check_integrity()


def test_pages_and_layouts_of_the_tests_differ() -> None:
    """The pages and layouts that the tests use differ from each other."""
    first, second = chain("a", 2)

    assert page_of(first) != page_of(second)
    assert LAYOUT != OTHER_LAYOUT
