"""Finds the tenant that holds an API key, in reads that waiting requests share, without a cache.

    get("a") ──► read(a)                  the first caller's read begins at once
    get("a"), get("a") ──► read(a)        these wait for the end of that read, and then share the next one
    get("b"), get("c") ──► read(b, c)     different keys that wait share one read as well

A tenant that floods the server with requests that are refused thus takes one connection of the database at a time, not
all of them. Decides nothing: whether a key is revoked, expired or suspended is for `tenancy.py`.
Invariant: a call gets the result of a read that began after the call. So each caller sees every change that was
committed before its call. A read that is already in progress never serves a new caller.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Generic, TypeVar

from graftwork.platform.database import Database
from graftwork.platform.ids import KeyId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.console_tickets import ConsoleTicket
from graftwork.platform.tenancy.keys import KeyParts, matches
from graftwork.platform.tenancy.request_rows import find_key_holders
from graftwork.platform.tenancy.tenants import ApiKey, Tenant

Value = TypeVar("Value")

_MAX_READS = 4
"""Reads in progress at once. One that hangs on a lost connection does not stop the others."""
_KEYS_PER_READ = 500


class SharedReads(Generic[Value]):
    """Reads values by key. Each key has at most one read in progress and one that waits.

    `read` returns the values of some keys from the database, without the keys that it does not have.
    All calls must come from the same event loop.
    """

    def __init__(self, read: Callable[[Collection[str]], Awaitable[Mapping[str, Value]]]) -> None:
        self._read = read
        self._waiting: dict[str, asyncio.Future[Value | None]] = {}
        """What the next read of each key will give, oldest first."""
        self._in_progress: set[str] = set()
        self._reads: set[asyncio.Task[None]] = set()

    async def get(self, key: str) -> Value | None:
        """Returns the key's value, or None if there is none. Raises the error of `read`, if it fails.

        The read goes on for the other callers if this one is cancelled.
        """
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_take_error)
            self._begin_read()
        return await asyncio.shield(future)

    def _begin_read(self) -> None:
        """Begins a read of the keys that wait and have no read in progress, if one more read is allowed."""
        keys = [key for key in self._waiting if key not in self._in_progress][:_KEYS_PER_READ]
        if not keys or len(self._reads) >= _MAX_READS:
            return
        self._in_progress.update(keys)
        futures = {key: self._waiting.pop(key) for key in keys}
        task = asyncio.get_running_loop().create_task(self._answer(futures), name="shared-read")
        self._reads.add(task)
        task.add_done_callback(self._end_read)

    async def _answer(self, futures: Mapping[str, "asyncio.Future[Value | None]"]) -> None:
        try:
            values = await self._read(futures.keys())
        except BaseException as error:
            for future in futures.values():
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for key, future in futures.items():
                future.set_result(values.get(key))
        finally:
            self._in_progress.difference_update(futures)

    def _end_read(self, task: "asyncio.Task[None]") -> None:
        self._reads.discard(task)
        self._begin_read()


def _take_error(future: "asyncio.Future[Value | None]") -> None:
    """Marks the error as seen: every caller may have been cancelled."""
    if not future.cancelled():
        future.exception()


_LAST_USED_STEP_S = 60.0  # `last_used_at` is written at most this often, so that most requests write nothing


class KeyHolders:
    """The stored API keys with their tenants. `pepper` is the key of the hashes."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        self._reads = SharedReads(self._read)
        self._noting: set[KeyId] = set()
        """The keys whose `last_used_at` is being written."""

    async def find(self, parts: KeyParts | ConsoleTicket) -> tuple[ApiKey, Tenant] | None:
        """Returns the stored key and its tenant, or None if the key is unknown or its secret is wrong.

        For a ticket of the console, finds the key that the ticket was made for, or None if the seal is wrong. Sees every change that was committed before the call. Takes the same time for an unknown key as for a wrong
        secret.
        """
        holder = await self._reads.get(parts.public_id)
        stored = holder[0].key_hash if holder else None
        if isinstance(parts, ConsoleTicket):
            return holder if parts.is_of(stored, self._pepper) else None
        return holder if matches(parts, stored, self._pepper) else None

    async def note_used(self, key: ApiKey, now: float) -> None:
        """Stores the time at which the key was used, unless a recent time is stored or another request stores it."""
        is_recent = key.last_used_at is not None and now - key.last_used_at < _LAST_USED_STEP_S
        if is_recent or key.id in self._noting:
            return
        self._noting.add(key.id)
        try:
            async with self._database.write() as session:
                await repository.change_key(session, key.tenant_id, key.id, {"last_used_at": now})
        finally:
            self._noting.discard(key.id)

    async def _read(self, public_ids: Collection[str]) -> dict[str, tuple[ApiKey, Tenant]]:
        return await self._database.read_few(partial(find_key_holders, public_ids=public_ids))
