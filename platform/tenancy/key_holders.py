"""Finds the tenant that holds an API key, in reads that waiting requests share, and stores when keys were last used.

    get("a") ──► read(a)                  the first caller's read begins at once
    get("a"), get("a") ──► read(a)        these wait for the end of that read, and then share the next one
    get("b"), get("c") ──► read(b, c)     different keys that wait share one read as well

A tenant that floods the server with requests that are refused thus takes one connection of the database at a time, not
all of them. Decides nothing: whether a key is revoked, expired or suspended is for `tenancy.py`.
Invariant: a call gets the result of a read that began after the call. So each caller sees every change that was
committed before its call. A read that is already in progress never serves a new caller.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Generic, TypeVar

from graftwork.platform.database import Database
from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.keys.console_tickets import ConsoleTicket
from graftwork.platform.keys.keys import KeyParts, matches
from graftwork.platform.tenancy.key_rows import note_used
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


class KeyHolders:
    """The stored API keys with their tenants. `pepper` is the key of the hashes."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        self._reads = SharedReads(self._read)

    async def find(self, parts: KeyParts | ConsoleTicket) -> tuple[ApiKey, Tenant] | None:
        """Returns the stored key and its tenant, or None if the key is unknown or its secret is wrong.

        For a ticket of the console, finds the key that the ticket was made for, or None if the seal is wrong. Sees
        every change that was committed before the call. Takes the same time for an unknown key as for a wrong secret.
        """
        holder = await self._reads.get(parts.public_id)
        stored = holder[0].key_hash if holder else None
        if isinstance(parts, ConsoleTicket):
            return holder if parts.is_of(stored, self._pepper) else None
        return holder if matches(parts, stored, self._pepper) else None

    async def _read(self, public_ids: Collection[str]) -> dict[str, tuple[ApiKey, Tenant]]:
        return await self._database.read_few(partial(find_key_holders, public_ids=public_ids))


FLUSH_USES_S = 5.0
"""How often a gateway calls `KeyUses.flush`, in seconds."""
_LAST_USED_STEP_S = 60.0
_MOST_KEYS = 10_000


class KeyUses:
    """Stores when keys were last used: for each key at most once a minute, and never while a request waits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._due: dict[KeyId, tuple[TenantId, float]] = {}
        """The uses that `flush` will store."""
        self._stored: dict[KeyId, float] = {}
        """The uses that this process has stored since it forgot them last."""

    def note(self, key: ApiKey, now: float) -> None:
        """Notes that a key is used at `now`, in unix seconds, unless a use in the last minute is stored or noted."""
        stored = max(self._stored.get(key.id, -math.inf), key.last_used_at or -math.inf)
        if now - stored >= _LAST_USED_STEP_S and key.id not in self._due:
            self._due[key.id] = (key.tenant_id, now)

    async def flush(self) -> None:
        """Stores what was noted. If that fails, the next call stores it."""
        due = dict(self._due)
        if not due:
            return
        async with self._database.write() as session:
            await note_used(session, due)
        if len(self._stored) > _MOST_KEYS:
            self._stored.clear()
        for key_id, (_, used_at) in due.items():
            self._stored[key_id] = used_at
            del self._due[key_id]
