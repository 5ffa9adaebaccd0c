"""Tests the limits and reserves of domains on disk."""

from pathlib import Path

from graftwork.engine.kv.disk.file_format import file_bytes
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import ManualClock
from tests.engine.faulty_disk import (
    LAYOUT,
    ONE_PAGE_FILE,
    PAGE_BYTES,
    bytes_in,
    chain,
    domain_named,
    opened,
    readable,
    store,
)


def test_a_domain_over_its_limit_makes_room_first(tmp_path: Path) -> None:
    """After a domain's limit was lowered, its files are evicted before older files of others."""
    disk = opened(tmp_path, max_bytes=4 * ONE_PAGE_FILE)
    older, newer = [chain(f"old{n}", 1)[0] for n in range(2)], [chain(f"new{n}", 1)[0] for n in range(2)]
    for key in older:
        store(disk, "small", [key])
    for key in newer:
        store(disk, "greedy", [key])

    disk.set_limit(domain_named("greedy"), ONE_PAGE_FILE)
    store(disk, "third", chain("third", 1))

    assert [disk.holds(key) for key in (*older, *newer)] == [True, True, False, True]


def test_a_domain_at_its_limit_evicts_its_own_files(tmp_path: Path) -> None:
    """A domain at its limit evicts its own oldest file, even if the disk has room."""
    disk = opened(tmp_path)
    disk.set_limit(domain_named("x"), 2 * ONE_PAGE_FILE)

    for number in range(3):
        store(disk, "x", chain(str(number), 1))

    assert disk.bytes_of(domain_named("x")) == 2 * ONE_PAGE_FILE
    assert not disk.holds(chain("0", 1)[0])


def test_limits_can_be_enforced_without_a_write(tmp_path: Path) -> None:
    """Enforcing a lowered limit evicts the domain's least recently used files."""
    disk = opened(tmp_path)
    for number in range(4):
        store(disk, "x", chain(str(number), 1))
    disk.set_limit(domain_named("x"), ONE_PAGE_FILE)

    assert disk.enforce_limits() == 3
    assert disk.holds(chain("3", 1)[0])
    assert bytes_in(tmp_path) == ONE_PAGE_FILE


def test_a_reserve_is_not_taken_by_others(tmp_path: Path) -> None:
    """A domain keeps its reserve however much others write, and evicts its own pages for its newer ones."""
    disk = opened(tmp_path, max_bytes=4 * ONE_PAGE_FILE)
    disk.set_reserve(domain_named("calm"), 2 * ONE_PAGE_FILE)
    for number in range(3):
        store(disk, "calm", chain(f"calm{number}", 1))

    for number in range(10):
        store(disk, "flood", chain(str(number), 1))

    assert disk.bytes_of(domain_named("calm")) == 2 * ONE_PAGE_FILE
    assert disk.bytes_of(domain_named("flood")) == 2 * ONE_PAGE_FILE
    disk.set_reserve(domain_named("flood"), 2 * ONE_PAGE_FILE)
    assert store(disk, "calm", chain("calm9", 1)) == 1
    assert disk.bytes_of(domain_named("calm")) == 2 * ONE_PAGE_FILE


def test_a_file_inside_a_reserve_stays_while_others_are_above_theirs(tmp_path: Path) -> None:
    """A least recently used file that is larger than its domain's reserve stays while another domain is above its
    reserve."""
    calm, one = chain("calm", 3), ONE_PAGE_FILE
    disk = opened(tmp_path, max_bytes=9 * one)
    disk.set_reserve(domain_named("calm"), file_bytes(3, PAGE_BYTES) - one)
    store(disk, "calm", calm)

    for number in range(20):
        store(disk, "flood", chain(str(number), 1))

    assert readable(disk, calm) == calm
    assert disk.bytes_used > 8 * one
    disk.check_integrity()


def test_a_shared_reserve_is_divided_among_present_domains(tmp_path: Path) -> None:
    """With half of eight files reserved, each of two domains keeps two files against the other; an absent domain
    reserves nothing."""
    disk = DiskStore(tmp_path, 8 * ONE_PAGE_FILE, LAYOUT, clock=ManualClock(), reserve_share=0.5)
    disk.open()
    for number in range(4):
        store(disk, "calm", chain(f"calm{number}", 1))

    for number in range(20):
        store(disk, "flood", chain(str(number), 1))
    calm_after_flood = disk.bytes_of(domain_named("calm"))
    for number in range(20):
        store(disk, "calm", chain(f"more{number}", 1))

    assert calm_after_flood == 2 * ONE_PAGE_FILE
    assert disk.bytes_of(domain_named("flood")) == 2 * ONE_PAGE_FILE
    assert disk.bytes_of(domain_named("calm")) == 6 * ONE_PAGE_FILE
    disk.check_integrity()
