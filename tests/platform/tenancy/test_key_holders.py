"""Tests of reads that waiting requests share: how many reads there are, and what each request sees."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database, ReadSession
from graftwork.platform.errors import NotAuthenticated
from graftwork.platform.tenancy.key_holders import SharedReads
from graftwork.platform.tenancy.tenancy import Tenancy

WITHIN_S = 60
Found = TypeVar("Found")


class HeldDatabase(Database):
    """A database that counts its reads, and holds them while `go_on` is not set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.num_reads = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def read_few(self, read: Callable[[ReadSession], Awaitable[Found]]) -> Found:
        found = await super().read_few(read)
        self.num_reads += 1
        self.begun.set()
        await self.go_on.wait()
        return found

    def hold(self) -> None:
        self.go_on.clear()
        self.begun.clear()
        self.num_reads = 0


@pytest.fixture
async def held(tmp_path: Path) -> AsyncGenerator[HeldDatabase, None]:
    database = HeldDatabase(f"sqlite+aiosqlite:///{tmp_path / 'held.db'}")
    await database.upgrade_to_head()
    yield database
    await database.close()


async def all_wait() -> None:
    """Lets every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_hundred_requests_make_two_reads(held: HeldDatabase, manual_clock: ManualClock) -> None:
    """While the read of the first request is in progress, all others wait for the next read, which they share."""
    tenancy = Tenancy(held, b"pepper", manual_clock)
    tenant = await tenancy.create_tenant("acme")
    _, key = await tenancy.create_key(tenant.id, "first")
    await tenancy.authenticate(key)
    held.hold()

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(tenancy.authenticate(key))]
        await held.begun.wait()
        answers += [tasks.create_task(tenancy.authenticate(key)) for _ in range(99)]
        await all_wait()
        held.go_on.set()

    assert {answer.result().tenant_id for answer in answers} == {tenant.id}
    assert held.num_reads == 2


async def test_a_revoked_key_is_refused_at_once(held: HeldDatabase, manual_clock: ManualClock) -> None:
    """A request that arrives after the revocation is refused, even while a read from before it is in progress."""
    tenancy = Tenancy(held, b"pepper", manual_clock)
    tenant = await tenancy.create_tenant("acme")
    stored, key = await tenancy.create_key(tenant.id, "first")
    await tenancy.authenticate(key)
    held.hold()

    async with asyncio.timeout(WITHIN_S):
        before = asyncio.create_task(tenancy.authenticate(key))
        await held.begun.wait()
        await tenancy.revoke_key(tenant.id, stored.id)
        after = asyncio.create_task(tenancy.authenticate(key))
        await all_wait()
        held.go_on.set()
        assert (await before).tenant_id == tenant.id
        with pytest.raises(NotAuthenticated, match="revoked"):
            await after


class ListedReads:
    """Reads that a test ends one by one. The value of a key is the number of its read."""

    def __init__(self) -> None:
        self.reads: list[tuple[list[str], asyncio.Future[None]]] = []

    async def read(self, keys: Collection[str]) -> Mapping[str, int]:
        number, end = len(self.reads), asyncio.get_running_loop().create_future()
        self.reads.append((sorted(keys), end))
        await end
        return {key: number for key in keys if key != "unknown"}

    def end(self, number: int, error: Exception | None = None) -> None:
        _, end = self.reads[number]
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)

    @property
    def keys(self) -> list[list[str]]:
        return [keys for keys, _ in self.reads]


async def test_different_keys_share_a_read() -> None:
    """Four reads are in progress at most; the keys that wait are read together, each by a read after its call."""
    listed = ListedReads()
    shared = SharedReads(listed.read)
    first = [asyncio.create_task(shared.get(key)) for key in "abcd"]
    await all_wait()
    later = [asyncio.create_task(shared.get(key)) for key in ("e", "f", "a", "unknown", "e")]
    await all_wait()
    assert listed.keys == [["a"], ["b"], ["c"], ["d"]]

    listed.end(3)
    await all_wait()
    assert listed.keys[4:] == [["e", "f", "unknown"]]  # `a` has a read in progress
    listed.end(0)
    await all_wait()
    assert listed.keys[5:] == [["a"]]
    for number in (1, 2, 4, 5):
        listed.end(number)

    assert await asyncio.gather(*first) == [0, 1, 2, 3]
    assert await asyncio.gather(*later) == [4, 4, 5, None, 4]


async def test_a_failure_or_a_cancelled_caller_stops_no_other() -> None:
    """A failed read fails its own callers and no later one; a read goes on if the caller that began it leaves."""
    listed = ListedReads()
    shared = SharedReads(listed.read)
    fails = asyncio.create_task(shared.get("a"))
    await all_wait()
    leaves, stays = asyncio.create_task(shared.get("a")), asyncio.create_task(shared.get("a"))
    await all_wait()
    leaves.cancel()
    listed.end(0, ValueError("broken"))
    await all_wait()
    listed.end(1)

    with pytest.raises(ValueError, match="broken"):
        await fails
    assert await stays == 1
    assert leaves.cancelled()
