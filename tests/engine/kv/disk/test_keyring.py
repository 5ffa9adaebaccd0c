"""Tests which keys of KV files an engine keeps, and what it does with the files of the other domains."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.keyring import MAX_KEYS, Keyring
from graftwork.engine.kv.disk.store import DiskStore
from tests.engine.faulty_disk import FaultyFiles, chain, domain_named, opened, pages_of, quick_folder, readable, store

KEY, OTHER_KEY = KvFileKey(b"k" * 32), KvFileKey(b"o" * 32)
KEYS = chain("a", 4)
LAYOUT = b"l" * 32
X = domain_named("x")


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_folder() as place:
        yield Path(place)


def lock(disk: DiskStore) -> None:
    """Lets requests of so many other domains come that the keys of all before are dropped."""
    for number in range(MAX_KEYS):
        disk.unlock(domain_named(f"other-{number}"), OTHER_KEY)


def may_write(keyring: Keyring, name: str) -> bool:
    pages = [memoryview(page) for page in pages_of(KEYS)]
    return keyring.prepare(LAYOUT, domain_named(name), KEYS, pages) is not None


def test_a_locked_domain_is_neither_read_nor_written(root: Path) -> None:
    """A domain whose key was dropped for newer ones writes nothing, and finds all of its pages when its key comes again."""
    disk = opened(root)
    disk.unlock(X, KEY)
    store(disk, "x", KEYS)
    before = sorted(root.iterdir())

    lock(disk)
    found = [*readable(disk, KEYS), *filter(disk.holds, KEYS)]
    num_written = store(disk, "x", chain("b", 2))
    after = sorted(root.iterdir())
    disk.unlock(X, KEY)

    assert (found, num_written, after) == ([], 0, before)
    assert readable(disk, KEYS) == list(KEYS)
    assert disk.counters.corrupt == 0


def test_a_lock_during_a_write_loses_no_page(root: Path) -> None:
    """A domain that is locked while its file is written finds the pages when its key comes again."""

    class Interrupted(FaultyFiles):
        def rename(self, name: str, new_name: str) -> None:
            lock(disk)
            super().rename(name, new_name)

    disk = opened(root, files=Interrupted(root))
    disk.unlock(X, KEY)
    store(disk, "x", KEYS)
    disk.unlock(X, KEY)

    assert readable(disk, KEYS) == list(KEYS)


def test_a_key_that_is_used_stays() -> None:
    """What is dropped is the key whose requests came longest ago; a destroyed domain that is dropped writes nothing."""
    keyring = Keyring(max_keys=2)
    for name in ("x", "y", "x", "z"):
        keyring.add(domain_named(name), KEY)
    seals = {name: keyring.seals(domain_named(name)) for name in ("x", "y", "z")}
    for name in ("x", "y", "z"):
        keyring.destroy(domain_named(name))

    assert seals == {"x": True, "y": False, "z": True}
    assert [name for name in ("x", "y", "z", "w") if may_write(keyring, name)] == ["w"]


def test_thousands_of_domains_take_bounded_memory() -> None:
    """After 5,000 domains, as many keys are kept as may be; each other domain is locked, and new ones are not."""
    keyring = Keyring(max_keys=100)
    seen = [f"tenant-{number}" for number in range(5_000)]

    for name in seen:
        keyring.add(domain_named(name), KEY)

    assert sum(keyring.seals(domain_named(name)) for name in seen) == 100
    assert not any(may_write(keyring, name) for name in seen[:-100])
    assert sum(may_write(keyring, f"new-{number}") for number in range(2_000)) >= 1_999
