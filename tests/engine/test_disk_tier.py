"""The disk tier where the disk behaves: what is kept, what goes first, what a restart finds."""

import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.disk_tier import DiskTier
from graftwork.engine.page_file import file_bytes
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from tests.engine.disk_lab import (
    LAYOUT,
    ONE_PAGE_FILE,
    OTHER_LAYOUT,
    PAGE_BYTES,
    FragileFiles,
    bytes_in,
    chain,
    opened,
    page_of,
    pages_of,
    party,
    quick_folder,
    readable,
    store,
)
from tests.hypothesis_profiles import examples


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Pages written in two runs come back in one reading, up to the first that is not there."""
    tier = opened(tmp_path)
    keys = chain("a", 6)
    store(tier, "x", keys[:2])
    store(tier, "x", keys[2:5])
    space = bytearray(6 * PAGE_BYTES)

    num_read = tier.read_run(keys, memoryview(space))

    assert num_read == 5
    assert bytes(space[: 5 * PAGE_BYTES]) == b"".join(pages_of(keys[:5]))
    assert tier.counters.read == 5
    tier.check_integrity()


def test_pages_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    """A longer run adds only what is new, and a page given twice is written once."""
    tier = opened(tmp_path)
    keys = chain("a", 4)
    store(tier, "x", keys[:2])

    assert store(tier, "y", [*keys, keys[3]]) == 2
    assert tier.num_pages == 4
    assert tier.bytes_of(party("y")) == file_bytes(2, PAGE_BYTES)


def test_a_restart_finds_everything_in_the_order_of_its_use(tmp_path: Path) -> None:
    """After reopening, all pages are right, and room is made at the cost of what was used least recently."""
    first = opened(tmp_path)
    old, used, new = chain("old", 1), chain("used", 1), chain("new", 1)
    for keys in (used, old, new):
        store(first, "x", keys)
    readable(first, used)
    first.close()

    tier = opened(tmp_path, max_bytes=3 * ONE_PAGE_FILE)
    assert readable(tier, []) == []
    store(tier, "x", chain("newest", 1))

    assert [tier.holds(keys[0]) for keys in (old, used, new)] == [False, True, True]
    assert readable(tier, [*used, *new]) == [*used, *new]
    tier.check_integrity()


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path) -> None:
    """A folder that is over its budget when it is opened gives up what was used least recently."""
    first = opened(tmp_path)
    for number in range(6):
        store(first, "x", chain(str(number), 1))
    first.close()

    tier = opened(tmp_path, max_bytes=2 * ONE_PAGE_FILE)

    assert bytes_in(tmp_path) <= 2 * ONE_PAGE_FILE
    assert [tier.holds(chain(str(number), 1)[0]) for number in range(6)] == [False] * 4 + [True] * 2
    assert tier.counters.evicted == 4


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["write", "read", "touch"]), st.integers(0, 7)), max_size=40))
def test_eviction_is_least_recently_used(steps: list[tuple[str, int]]) -> None:
    """With files of one page, the tier holds what an ordered dictionary of the same size holds."""
    model: OrderedDict[int, None] = OrderedDict()
    with quick_folder() as folder:
        tier = opened(Path(folder), max_bytes=4 * ONE_PAGE_FILE)
        keys = [chain(str(number), 1) for number in range(8)]
        for step, number in steps:
            if step == "write" and number not in model:
                store(tier, "x", keys[number])
                model[number] = None
                if len(model) > 4:
                    model.popitem(last=False)
            elif step == "read":
                assert readable(tier, keys[number]) == (keys[number] if number in model else [])
            elif step == "touch":
                tier.touch(keys[number])
            if step != "write" and number in model:
                model.move_to_end(number)
        tier.close()

    assert [number for number in range(8) if tier.holds(keys[number][0])] == sorted(model)


def test_the_end_of_a_run_goes_before_its_beginning(tmp_path: Path) -> None:
    """A run of several files loses its last pages first: the others are worth nothing without its first."""
    tier = opened(tmp_path, max_bytes=5 * ONE_PAGE_FILE)
    keys = chain("long", 8)
    assert store(tier, "x", keys) == 8

    for number in range(2):
        store(tier, "x", chain(str(number), 1))

    held = [tier.holds(key) for key in keys]
    assert held == sorted(held, reverse=True)
    assert 0 < sum(held) < 8


def test_a_run_does_not_evict_itself(tmp_path: Path) -> None:
    """Of a run that is larger than the budget the beginning is kept."""
    tier = opened(tmp_path, max_bytes=3 * ONE_PAGE_FILE)
    keys = chain("long", 9)

    num_stored = store(tier, "x", keys)

    assert 0 < num_stored < 9
    assert readable(tier, keys) == keys[:num_stored]
    assert store(tier, "x", keys) == 0


def test_the_budget_holds_even_while_a_file_is_written(tmp_path: Path) -> None:
    """The folder is never larger than allowed: room is made before it is used."""
    files = FragileFiles(tmp_path)
    tier = opened(tmp_path, max_bytes=5 * ONE_PAGE_FILE, files=files)

    for number in range(30):
        store(tier, "x", chain(str(number), 1 + number % 3))

    assert 3 * ONE_PAGE_FILE < files.most_bytes <= 5 * ONE_PAGE_FILE


def test_a_party_over_its_limit_makes_room_first(tmp_path: Path) -> None:
    """Once its limit is lowered, a party's files go before older ones of others."""
    tier = opened(tmp_path, max_bytes=4 * ONE_PAGE_FILE)
    older, newer = [chain(f"old{n}", 1)[0] for n in range(2)], [chain(f"new{n}", 1)[0] for n in range(2)]
    for key in older:
        store(tier, "small", [key])
    for key in newer:
        store(tier, "greedy", [key])

    tier.set_limit(party("greedy"), ONE_PAGE_FILE)
    store(tier, "third", chain("third", 1))

    assert [tier.holds(key) for key in (*older, *newer)] == [True, True, False, True]


def test_a_party_at_its_limit_makes_room_from_its_own(tmp_path: Path) -> None:
    """A new run of a limited party replaces its own oldest file though the disk has room."""
    tier = opened(tmp_path)
    tier.set_limit(party("x"), 2 * ONE_PAGE_FILE)

    for number in range(3):
        store(tier, "x", chain(str(number), 1))

    assert tier.bytes_of(party("x")) == 2 * ONE_PAGE_FILE
    assert not tier.holds(chain("0", 1)[0])


def test_limits_can_be_enforced_without_a_write(tmp_path: Path) -> None:
    """A lowered limit takes effect when it is enforced, least recently used first."""
    tier = opened(tmp_path)
    for number in range(4):
        store(tier, "x", chain(str(number), 1))
    tier.set_limit(party("x"), ONE_PAGE_FILE)

    assert tier.enforce_limits() == 3
    assert tier.holds(chain("3", 1)[0])
    assert bytes_in(tmp_path) == ONE_PAGE_FILE


def test_a_reserve_is_not_taken_by_others(tmp_path: Path) -> None:
    """However much others write, a party keeps its reserve; for its own newer pages it gives way itself."""
    tier = opened(tmp_path, max_bytes=4 * ONE_PAGE_FILE)
    tier.set_reserve(party("calm"), 2 * ONE_PAGE_FILE)
    for number in range(3):
        store(tier, "calm", chain(f"calm{number}", 1))

    for number in range(10):
        store(tier, "flood", chain(str(number), 1))

    assert tier.bytes_of(party("calm")) == 2 * ONE_PAGE_FILE
    assert tier.bytes_of(party("flood")) == 2 * ONE_PAGE_FILE
    tier.set_reserve(party("flood"), 2 * ONE_PAGE_FILE)
    assert store(tier, "calm", chain("calm9", 1)) == 1
    assert tier.bytes_of(party("calm")) == 2 * ONE_PAGE_FILE


def test_a_file_that_reaches_into_a_reserve_stays_while_others_can_spare_one(tmp_path: Path) -> None:
    """A party has one file, larger than its reserve, and used least recently; whoever has more than it needs to keep
    gives up its own."""
    calm, one = chain("calm", 3), ONE_PAGE_FILE
    tier = opened(tmp_path, max_bytes=9 * one)
    tier.set_reserve(party("calm"), file_bytes(3, PAGE_BYTES) - one)
    store(tier, "calm", calm)

    for number in range(20):
        store(tier, "flood", chain(str(number), 1))

    assert readable(tier, calm) == calm
    assert tier.bytes_used > 8 * one
    tier.check_integrity()


def test_a_shared_reserve_is_parted_among_those_who_are_there(tmp_path: Path) -> None:
    """Of eight files' room half is reserved: of two parties each keeps two files against the other's flood, whoever
    it is; a party that was never there keeps nothing free."""
    tier = DiskTier(tmp_path, 8 * ONE_PAGE_FILE, LAYOUT, clock=ManualClock(), reserve_share=0.5)
    tier.open()
    for number in range(4):
        store(tier, "calm", chain(f"calm{number}", 1))

    for number in range(20):
        store(tier, "flood", chain(str(number), 1))
    calm_after_flood = tier.bytes_of(party("calm"))
    for number in range(20):
        store(tier, "calm", chain(f"more{number}", 1))

    assert calm_after_flood == 2 * ONE_PAGE_FILE
    assert tier.bytes_of(party("flood")) == 2 * ONE_PAGE_FILE
    assert tier.bytes_of(party("calm")) == 6 * ONE_PAGE_FILE
    tier.check_integrity()


def test_a_forgotten_page_is_not_answered(tmp_path: Path) -> None:
    """Its neighbours are, until the last of them is forgotten and the file goes."""
    tier = opened(tmp_path)
    keys = chain("a", 2)
    store(tier, "x", keys)

    tier.forget(keys[0])

    assert readable(tier, keys) == [keys[1]]
    tier.forget(keys[1])
    tier.sweep()
    assert (tier.bytes_used, bytes_in(tmp_path)) == (0, 0)


def test_a_forgotten_party_leaves_nothing(tmp_path: Path) -> None:
    """All its files are gone from the disk, and nobody else's."""
    tier = opened(tmp_path)
    store(tier, "x", chain("a", 3))
    store(tier, "x", chain("b", 1))
    store(tier, "y", chain("c", 1))

    assert tier.forget_owner(party("x")) == 4
    assert readable(tier, [*chain("a", 3), *chain("b", 1)]) == []
    tier.sweep()
    assert bytes_in(tmp_path) == tier.bytes_used == ONE_PAGE_FILE


def test_forgetting_touches_no_file(tmp_path: Path) -> None:
    """The engine's loop forgets, and must not wait for a disk: files go with the next sweep, or before the next write."""
    files = FragileFiles(tmp_path)
    tier = opened(tmp_path, max_bytes=3 * ONE_PAGE_FILE, files=files)
    for scope in "abc":
        store(tier, "x", chain(scope, 1))
    before = files.num_operations

    tier.forget(chain("a", 1)[0])
    tier.forget_owner(party("x"))

    assert (files.num_operations, tier.num_pages, bytes_in(tmp_path)) == (before, 0, 3 * ONE_PAGE_FILE)
    tier.check_integrity()
    assert store(tier, "x", chain("d", 1)) == 1
    assert (tier.counters.evicted, bytes_in(tmp_path)) == (0, ONE_PAGE_FILE)
    tier.check_integrity()


def test_pages_of_another_layout_are_passed_over_and_kept(tmp_path: Path) -> None:
    """They are not answered, count as foreign, are there again for their own engine, and go when room is needed."""
    other = opened(tmp_path, layout=OTHER_LAYOUT)
    keys = chain("a", 1)
    store(other, "x", keys)
    other.close()

    tier = opened(tmp_path, max_bytes=2 * ONE_PAGE_FILE)

    assert (tier.holds(keys[0]), tier.counters.foreign, tier.bytes_used) == (False, 1, ONE_PAGE_FILE)
    store(tier, "x", chain("b", 1))
    tier.close()
    again = opened(tmp_path, layout=OTHER_LAYOUT)
    assert readable(again, keys) == keys
    again.close()
    full = opened(tmp_path, max_bytes=2 * ONE_PAGE_FILE)
    store(full, "x", [*chain("c", 1)])
    store(full, "x", [*chain("d", 1)])
    full.close()
    assert not opened(tmp_path, layout=OTHER_LAYOUT).holds(keys[0])


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """What has not the tier's names is counted as foreign, takes nothing from the budget, and stays."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()

    tier = opened(tmp_path, max_bytes=0)

    assert store(tier, "x", chain("a", 1)) == 0
    assert (tier.counters.foreign, tier.bytes_used) == (1, 0)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_has_one_engine(tmp_path: Path) -> None:
    """A second tier is told to take another folder until the first lets go."""
    first = opened(tmp_path)

    with pytest.raises(InvalidRequest, match="give each its own"):
        opened(tmp_path)

    first.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """Where a file stands in the way, the message says which folder."""
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidRequest, match="file/below"):
        opened(tmp_path / "file" / "below")


def test_only_the_owner_can_read_the_pages(tmp_path: Path) -> None:
    """KV tells what was said: the folder is closed to others, and so is each file."""
    tier = opened(tmp_path / "kv")
    store(tier, "x", chain("a", 1))

    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "kv").iterdir())


def test_readers_beside_an_evicting_writer_see_right_bytes_or_none(tmp_path: Path) -> None:
    """While one thread writes far more than there is room for, others only ever read what belongs to a key."""
    tier = opened(tmp_path, max_bytes=6 * ONE_PAGE_FILE)
    runs = [chain(str(number), 2) for number in range(60)]
    is_over = threading.Event()
    wrong: list[str] = []
    num_read = [0, 0]

    def read_all(reader: int) -> None:
        while not is_over.is_set():
            for keys in runs:
                space = bytearray(2 * PAGE_BYTES)
                count = tier.read_run(keys, memoryview(space))
                num_read[reader] += count
                if bytes(space[: count * PAGE_BYTES]) != b"".join(pages_of(keys[:count])):
                    wrong.append(keys[0].hex())

    readers = [threading.Thread(target=read_all, args=(reader,)) for reader in range(2)]
    for thread in readers:
        thread.start()
    for keys in runs * 3:
        store(tier, "x", keys)
    is_over.set()
    for thread in readers:
        thread.join()

    assert wrong == []
    assert sum(num_read) > 0
    assert (tier.counters.corrupt, tier.counters.failed) == (0, 0)
    tier.check_integrity()


WRITER = """
import itertools, sys
from pathlib import Path
from tests.engine.disk_lab import chain, opened, store
tier = opened(Path(sys.argv[1]), max_bytes=2**30)
for number in itertools.count():
    store(tier, "x", chain(str(number), 3))
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_lines", [1, 7, 40])
def test_a_killed_engine_loses_nothing_that_it_had_stored(tmp_path: Path, num_lines: int) -> None:
    """After SIGKILL in the middle of its work, every run that it had reported is there, and right."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        stored = [int(child.stdout.readline()) for _ in range(num_lines)]
        child.kill()
        child.wait()

    tier = opened(tmp_path, max_bytes=2**30)

    keys = [key for number in stored for key in chain(str(number), 3)]
    assert len(keys) == 3 * num_lines
    assert readable(tier, keys) == keys
    assert tier.counters.corrupt == 0
    assert bytes_in(tmp_path) == tier.bytes_used
    tier.check_integrity()


def test_layouts_and_pages_of_the_lab_differ() -> None:
    """The tests tell pages and layouts apart."""
    first, second = chain("a", 2)

    assert page_of(first) != page_of(second)
    assert LAYOUT != OTHER_LAYOUT
