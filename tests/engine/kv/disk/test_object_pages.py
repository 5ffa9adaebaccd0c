"""Engines that share a bucket: what one reads of another, damage, faults, budgets and erasure. The bucket is a folder."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.bucket import Bucket
from graftwork.engine.kv.disk.files import FileEntry
from graftwork.engine.kv.disk.object_pages import ObjectPages
from graftwork.engine.kv.disk.shared import SharedStore
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.outbound.buckets import check_bucket_url
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


class FaultyBucket(Bucket):
    """A bucket that fails on demand, and counts what it was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}")
        self.is_absent = False
        self.num_asked = 0
        self.before_put = threading.Event()
        """Is set when an object is about to be written."""
        self.may_put = threading.Event()
        """While it is not set, writes wait."""
        self.may_put.set()

    def _ask(self) -> None:
        self.num_asked += 1
        if self.is_absent:
            raise OSError("the bucket does not answer")

    def entries(self, folder: str) -> list[FileEntry]:
        self._ask()
        return super().entries(folder)

    def put(self, name: str, content: bytes) -> None:
        self.before_put.set()
        assert self.may_put.wait(30)
        self._ask()
        super().put(name, content)

    def read(self, name: str, offset: int, into: memoryview) -> int:
        self._ask()
        return super().read(name, offset, into)


class Engine:
    """The store of one engine, with a folder of its own and a bucket that it shares. Its thread is not started."""

    def __init__(self, root: Path, name: str, *, layout: bytes = LAYOUT, max_bytes: int = 2**20) -> None:
        self.clock = ManualClock()
        self.bucket = FaultyBucket(root / "bucket")
        own = DiskStore(root / name, 2**20, layout, clock=self.clock)
        own.open()
        self.pages = ObjectPages(self.bucket, layout, max_bytes, self.clock, own.keyring)
        self.store = SharedStore(own, self.pages, self.clock)
        self.store.refresh()

    def write(self, keys: list[PageKey], domain: str = "x", above: list[PageKey] | None = None) -> None:
        """Stores pages, and returns when they are in the bucket, or could not be."""
        self.clock.advance(1)
        self.store.write(domain_named(domain), keys, pages_of(keys), above or [])
        self.pages.flush()

    def read(self, keys: list[PageKey]) -> list[PageKey]:
        """Returns the keys of the longest prefix that can be read. Fails if a page has wrong bytes."""
        space = bytearray(PAGE_BYTES * len(keys))
        count = self.store.read_pages(keys, memoryview(space))
        for number, key in enumerate(keys[:count]):
            assert bytes(space[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]) == page_of(key), "wrong bytes"
        return keys[:count]

    def lose_own_files(self) -> None:
        """Forgets what is on the engine's own disk."""
        for key in KEYS:
            self.store.own.forget(key)
        self.store.own.sweep()


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_folder() as place:
        yield Path(place)


def objects(root: Path) -> list[Path]:
    return sorted(path for path in (root / "bucket").rglob("*.kvpages"))


def test_an_engine_reads_what_another_has_written(root: Path) -> None:
    """Pages of two engines are read as one run, after a listing and not before; so are those of an engine that is gone."""
    first, second = Engine(root, "a"), Engine(root, "b")
    first.write(KEYS[:3])
    assert not second.store.holds(KEYS[0])

    second.store.refresh()
    second.write(KEYS[3:], above=KEYS[:3])
    first.store.refresh()
    first.store.close()
    third = Engine(root, "c")

    assert second.read(KEYS) == first.read(KEYS) == third.read(KEYS) == KEYS
    assert third.store.objects.num_pages == 6
    assert third.store.objects.num_bytes == sum(path.stat().st_size for path in objects(root))
    assert third.store.counters.object_read == 6
    for engine in (first, second, third):
        engine.store.check_integrity()


def test_pages_are_uploaded_once(root: Path) -> None:
    """What another engine has uploaded is not uploaded again, and what a fault has kept back is, with the next pages."""
    first, second = Engine(root, "a"), Engine(root, "b")
    first.write(KEYS[:2])
    second.store.refresh()
    second.write(KEYS[:2])
    assert len(objects(root)) == 1

    second.bucket.is_absent = True
    second.write(KEYS[2:4], above=KEYS[:2])
    assert len(objects(root)) == 1
    second.bucket.is_absent = False
    second.write(KEYS[4:], above=KEYS[:4])
    first.store.refresh()

    assert first.read(KEYS) == KEYS
    assert len(objects(root)) == 3
    assert second.store.counters.object_failed == 1


def test_another_layout_reads_nothing(root: Path) -> None:
    """Engines whose pages mean something else share the bucket and find nothing of each other."""
    Engine(root, "a").write(KEYS)

    other = Engine(root, "b", layout=OTHER_LAYOUT)

    assert not any(map(other.store.holds, KEYS))
    assert other.store.objects.num_pages == 0


@pytest.mark.parametrize("offset", [-1, 40])
def test_a_damaged_object_is_never_read(root: Path, offset: int) -> None:
    """A changed byte in a page or in the header costs a recomputation, and is counted; a damaged page's object goes."""
    Engine(root, "a").write(KEYS)
    (path,) = objects(root)
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)

    reader = Engine(root, "b")

    assert reader.read(KEYS) == (KEYS[:5] if offset == -1 else [])
    assert reader.store.counters.corrupt == 1
    assert len(objects(root)) == (0 if offset == -1 else 1)
    reader.store.check_integrity()


def test_a_removed_object_is_not_found(root: Path) -> None:
    """An object that another engine has removed reads as nothing, and is forgotten by the next listing."""
    first, second = Engine(root, "a"), Engine(root, "b")
    first.write(KEYS)
    second.store.refresh()
    for path in objects(root):
        path.unlink()

    assert second.read(KEYS) == []
    assert not second.store.holds(KEYS[0])
    first.lose_own_files()
    first.store.refresh()
    assert first.read(KEYS) == []
    assert second.store.counters.object_failed == 0


def test_a_bucket_that_does_not_answer_is_asked_once(root: Path) -> None:
    """After the first failed read no page is found there, so that requests do not wait; a listing brings all back."""
    first, second = Engine(root, "a"), Engine(root, "b")
    first.write(KEYS)
    second.store.refresh()
    second.bucket.is_absent = True
    asked = second.bucket.num_asked

    assert second.read(KEYS) == []
    assert not any(map(second.store.holds, KEYS))
    assert second.read(KEYS) == []
    assert second.bucket.num_asked == asked + 1
    assert second.store.counters.object_failed == 1
    second.bucket.is_absent = False
    second.store.refresh()
    assert second.read(KEYS) == KEYS


def test_an_erasure_reaches_all_objects_of_a_domain(root: Path) -> None:
    """One engine's erasure removes the domain's objects of all engines and layouts, and no other domain's."""
    first, second = Engine(root, "a"), Engine(root, "b")
    other = Engine(root, "c", layout=OTHER_LAYOUT)
    stays = chain("stays", 3)
    first.write(KEYS, "goes")
    first.write(stays, "stays")
    other.write(KEYS, "goes")

    second.store.forget_domain(domain_named("goes"))
    second.store.sweep()

    (left,) = objects(root)
    assert domain_named("stays").hex() in str(left)
    second.store.refresh()
    assert second.read(stays) == stays


def test_an_erasure_that_fails_is_tried_again(root: Path) -> None:
    """While the bucket does not answer nothing of the domain is found, and the next sweep removes its objects."""
    engine = Engine(root, "a")
    engine.write(KEYS, "goes")
    engine.bucket.is_absent = True
    engine.store.forget_domain(domain_named("goes"))
    engine.store.sweep()

    engine.bucket.is_absent = False
    engine.store.refresh()

    assert objects(root) == []
    assert not any(map(engine.store.holds, KEYS))


def test_an_upload_cannot_outlive_its_domain(root: Path) -> None:
    """A file that is being uploaded while its domain is erased is gone in the end, and those behind it never come."""
    engine = Engine(root, "a")
    engine.bucket.may_put.clear()
    engine.store.write(domain_named("goes"), KEYS[:3], pages_of(KEYS[:3]))
    assert engine.bucket.before_put.wait(30)
    engine.store.write(domain_named("goes"), KEYS[3:], pages_of(KEYS[3:]), KEYS[:3])
    engine.store.forget_domain(domain_named("goes"))
    engine.store.sweep()

    engine.bucket.may_put.set()
    engine.pages.flush()

    assert objects(root) == []
    engine.store.check_integrity()
    engine.write(KEYS, "goes")  # a tenant's pages after the erasure are its own again
    assert len(objects(root)) == 1


def test_forgotten_pages_leave_the_bucket(root: Path) -> None:
    """When a session is closed, the objects whose pages were all its own are removed."""
    engine = Engine(root, "a")
    engine.write(KEYS[:3])
    engine.write(KEYS[3:], above=KEYS[:3])

    for key in KEYS[3:]:
        engine.store.forget(key)
    engine.store.sweep()

    assert len(objects(root)) == 1
    assert engine.read(KEYS) == KEYS[:3]


def test_the_bucket_keeps_its_budget(root: Path) -> None:
    """The pages that were used longest ago go first, never those of the prompt that is stored, and an engine that comes
    with a smaller budget enforces it.
    """
    engine = Engine(root, "a", max_bytes=3 * ONE_PAGE_FILE)
    others = [chain(f"other {number}", 1) for number in range(2)]
    engine.write(KEYS[:1])
    for other in others:
        engine.write(other)
    engine.write(KEYS[1:2], above=KEYS[:1])

    assert [engine.pages.holds(key) for key in (KEYS[0], KEYS[1], others[0][0], others[1][0])] == [
        True,
        True,
        False,
        True,
    ]
    assert engine.store.objects.num_bytes == 3 * ONE_PAGE_FILE == sum(path.stat().st_size for path in objects(root))
    small = Engine(root, "b", max_bytes=ONE_PAGE_FILE)
    assert small.store.objects.num_bytes == ONE_PAGE_FILE
    assert len(objects(root)) == 1
    engine.store.refresh()
    engine.store.check_integrity()


def test_the_thread_lists_and_erases(root: Path) -> None:
    """With its thread, a store finds what others write, and its end uploads and erases what is queued."""
    first, second = Engine(root, "a"), Engine(root, "b")
    second.store.start(refresh_s=0.01, waits=False)
    first.write(KEYS)
    while not second.store.holds(KEYS[-1]):
        second.store.refresh()

    second.store.write(domain_named("y"), chain("y", 2), pages_of(chain("y", 2)))
    second.store.forget_domain(domain_named("x"))
    second.store.sweep()
    second.store.close()

    (left,) = objects(root)
    assert domain_named("y").hex() in str(left)


@pytest.mark.parametrize("url", ["", "bucket", "s3://", "ftp://bucket/prefix", "file://", "s3:///prefix"])
def test_an_url_without_a_bucket_is_refused(url: str) -> None:
    """The refusal names the flag and the forms that are right."""
    with pytest.raises(InvalidRequest, match=r"--kv-object-url .* s3://BUCKET/PREFIX"):
        check_bucket_url(url, "kv_object_url")


class Histories(RuleBasedStateMachine):
    """Two engines write, read, erase, forget and lose contact in any order. Reads are right bytes or nothing."""

    @initialize()
    def begin(self) -> None:
        self.place = quick_folder()
        root = Path(self.place.name)
        self.engines = [Engine(root, name, max_bytes=12 * ONE_PAGE_FILE) for name in ("a", "b")]
        self.erased: set[str] = set()

    engines_st = st.integers(0, 1)
    chains_st = st.sampled_from(["x", "y", "z"])

    @rule(number=engines_st, name=chains_st, count=st.integers(1, 5))
    def write(self, number: int, name: str, count: int) -> None:
        keys = chain(name, count)
        self.engines[number].write(keys, name)
        self.erased.discard(name)

    @rule(number=engines_st, name=chains_st)
    def read(self, number: int, name: str) -> None:
        found = self.engines[number].read(chain(name, 5))
        assert not (found and name in self.erased), "a page of an erased domain"

    @rule(number=engines_st)
    def refresh(self, number: int) -> None:
        self.engines[number].store.refresh()

    @rule(number=engines_st, is_absent=st.booleans())
    def lose_contact(self, number: int, is_absent: bool) -> None:
        self.engines[number].bucket.is_absent = is_absent

    @rule(number=engines_st, name=chains_st, count=st.integers(1, 5))
    def forget(self, number: int, name: str, count: int) -> None:
        for key in chain(name, 5)[count:]:
            self.engines[number].store.forget(key)
        self.engines[number].store.sweep()

    @rule(name=chains_st)
    def erase(self, name: str) -> None:
        """All engines are told, as a gateway does."""
        for engine in self.engines:
            engine.store.forget_domain(domain_named(name))
        for engine in self.engines:
            engine.store.sweep()
        self.erased.add(name)

    @invariant()
    def is_whole(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.store.check_integrity()
            assert engine.store.objects.num_bytes <= 12 * ONE_PAGE_FILE + 5 * ONE_PAGE_FILE

    def teardown(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.bucket.is_absent = False
            engine.store.close()
        if hasattr(self, "place"):
            self.place.cleanup()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
