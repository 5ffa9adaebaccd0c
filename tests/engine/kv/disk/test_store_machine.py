"""Tests the disk store with random sequences of writes, reads, crashes, refusals and damage."""

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from tests.engine.faulty_disk import (
    ONE_PAGE_FILE,
    OTHER_LAYOUT,
    PAGE_BYTES,
    Crash,
    FaultyFiles,
    bytes_in,
    chain,
    domain_named,
    opened,
    pages_of,
    quick_folder,
    readable,
    store,
)
from tests.hypothesis_profiles import examples

MAX_BYTES = 6 * ONE_PAGE_FILE
KEY = KvFileKey(b"k" * 32)
RUNS = [chain(scope, 5) for scope in "abcd"]
EVERY_KEY = [key for keys in RUNS for key in keys]
OPERATIONS = ["create", "rename", "remove", "read", "stamp", "sync"]
parts = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5))
shares = st.floats(0, 1, exclude_max=True)


def keys_of(part: tuple[int, int, int]) -> list[PageKey]:
    run, start, count = part
    return RUNS[run][start : start + count]


class DiskMachine(RuleBasedStateMachine):
    """Applies everything that can happen to a folder. The expected content of a page follows from its key."""

    def __init__(self) -> None:
        super().__init__()
        self.place = quick_folder()
        self.folder = Path(self.place.name) / "kv"
        self.stored: set[PageKey] = set()
        """Keys that were written to this folder at some time."""
        self.written: set[bytes] = set()
        """The contents of all files that were written to this folder at some time."""

    @initialize()
    def open(self) -> None:
        self.files = FaultyFiles(self.folder, self.written)
        self.disk = opened(self.folder, MAX_BYTES, files=self.files)
        # A restart reads only the heads of files, so a damaged page stays until it is read.
        self.is_damaged = any(path.read_bytes() not in self.written for path in self.folder.iterdir())
        self.was_refused = self.has_quotas = False
        self.limits: dict[str, int] = {}

    @property
    def is_sound(self) -> bool:
        """Whether the files are as they were written, and the disk has refused nothing since the folder was opened."""
        return not self.is_damaged and not self.was_refused

    @rule(part=parts, domain=st.sampled_from("xy"))
    def write(self, part: tuple[int, int, int], domain: str) -> None:
        keys = keys_of(part)
        is_held = [self.disk.holds(key) for key in keys]
        num_stored = store(self.disk, domain, keys)
        self.stored |= set(keys)
        if self.is_sound:
            stays = [key for key, was_held in zip(keys, is_held, strict=True) if was_held]
            news = [key for key, was_held in zip(keys, is_held, strict=True) if not was_held]
            assert all(map(self.disk.holds, stays + news[:num_stored]))
            assert not any(map(self.disk.holds, news[num_stored:]))
            assert num_stored > 0 or not news or self.has_quotas or stays
            assert num_stored == 0 or self.disk.bytes_of(domain_named(domain)) <= self.limits.get(domain, MAX_BYTES)

    @rule(part=parts)
    def read(self, part: tuple[int, int, int]) -> None:
        keys = keys_of(part)
        held = [self.disk.holds(key) for key in keys]
        space = bytearray(len(keys) * PAGE_BYTES)
        num_read = self.disk.read_pages(keys, memoryview(space))
        assert bytes(space[: num_read * PAGE_BYTES]) == b"".join(pages_of(keys[:num_read]))
        assert num_read <= [*held, False].index(False)
        if self.is_sound:
            assert num_read == [*held, False].index(False)

    @rule(key=st.sampled_from(EVERY_KEY))
    def forget(self, key: PageKey) -> None:
        self.disk.forget(key)
        assert not self.disk.holds(key)

    @rule(domain=st.sampled_from("xy"))
    def forget_domain(self, domain: str) -> None:
        held = self.disk.num_pages
        assert self.disk.forget_domain(domain_named(domain)) == held - self.disk.num_pages

    @rule()
    def sweep(self) -> None:
        self.disk.sweep()
        if self.is_sound:
            assert bytes_in(self.folder) == self.disk.bytes_used

    @rule(domain=st.sampled_from("xy"), limit=st.integers(0, MAX_BYTES), reserve=st.integers(0, MAX_BYTES))
    def set_quota(self, domain: str, limit: int, reserve: int) -> None:
        self.disk.set_limit(domain_named(domain), limit)
        self.disk.set_reserve(domain_named(domain), reserve)
        self.limits[domain] = limit
        self.has_quotas = True

    @rule()
    def enforce_limits(self) -> None:
        self.disk.enforce_limits()
        if self.is_sound:
            assert all(self.disk.bytes_of(domain_named(domain)) <= limit for domain, limit in self.limits.items())

    @rule(refused=st.sets(st.sampled_from(OPERATIONS), max_size=3))
    def refuse(self, refused: set[str]) -> None:
        self.files.refused = refused
        self.was_refused |= bool(refused)

    @rule()
    def restart(self) -> None:
        self.disk.close()
        self.open()

    @rule(after=st.integers(0, 6), part=parts)
    def crash(self, after: int, part: tuple[int, int, int]) -> None:
        self.files.crash_at = self.files.num_operations + after
        self.stored |= set(keys_of(part))
        try:
            store(self.disk, "x", keys_of(part))
            readable(self.disk, EVERY_KEY)
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
        if len(contents[0]) == len(contents[1]):  # the store cannot count bytes that others add
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
        self.disk.close()
        other = opened(self.folder, MAX_BYTES, OTHER_LAYOUT, FaultyFiles(self.folder, self.written))
        store(other, "x", RUNS[part[0]][: part[2]])
        other.close()
        self.open()

    @invariant()
    def the_budget_holds(self) -> None:
        assert max(self.files.most_bytes, bytes_in(self.folder)) <= MAX_BYTES

    @invariant()
    def the_counts_are_right(self) -> None:
        refused, self.files.refused = self.files.refused, set()
        self.disk.check_integrity()
        self.files.refused = refused
        assert all(key in self.stored for key in EVERY_KEY if self.disk.holds(key))

    def teardown(self) -> None:
        self.files.refused = set()
        readable(self.disk, EVERY_KEY)
        self.disk.close()
        again = opened(self.folder, MAX_BYTES)
        assert set(readable(again, EVERY_KEY)) <= self.stored
        again.check_integrity()
        again.close()
        self.place.cleanup()

    def _pick(self, which: float) -> Path:
        paths = sorted(self.folder.iterdir())
        return paths[int(which * len(paths))]


class EncryptedDiskMachine(DiskMachine):
    """The same with a key for one of the two domains, so that its files are encrypted and the other's are plain."""

    @initialize()
    def open(self) -> None:
        super().open()
        self.disk.unlock(domain_named("x"), KEY)

    @rule(domain=st.sampled_from("xy"))
    def forget_domain(self, domain: str) -> None:
        super().forget_domain(domain)
        self.disk.unlock(domain_named("x"), KEY)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=examples(150), stateful_step_count=30)
TestEncryptedDiskMachine = EncryptedDiskMachine.TestCase
TestEncryptedDiskMachine.settings = settings(max_examples=examples(150), stateful_step_count=30)
