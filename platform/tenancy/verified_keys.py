"""Remembers the keys that this process has verified, and limits, so that a request with them reads no database.

Owns the memory of one process. It holds digests of keys, and never a key. What is remembered is used only while these
hold:

- the number of changes of access and limits in the database (see `key_rows.py`) is what it was before the read,
- a read of this number that began less than `_CONFIRMED_FOR_S` ago has confirmed it,
- it was read less than `_KEPT_FOR_S` ago.

So a change on another gateway takes effect here within a second, also if the database does not answer: then each
request reads its key and limits again, as without this memory. A change of this process takes effect at once.
Without `poll`, nothing is ever confirmed, and everything is read.

RecentKeys knows less: which tenant a key belonged to seconds ago, so that a request can be refused at once. It never
allows one. So a key that was revoked a moment ago can get a 429 instead of a 401, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from graftwork.platform.clock import Clock
from graftwork.platform.ids import TenantId
from graftwork.platform.keys.keys import key_digest
from graftwork.platform.tenancy.tenants import ApiKey, Tenant

POLL_S = 0.25
"""How often a gateway calls `poll`, in seconds."""
_CONFIRMED_FOR_S = 0.9
_KEPT_FOR_S = 30.0
"""Bounds what a change can do that an older version of the server makes, which does not count changes."""
RECENT_FOR_S = 10.0

K = TypeVar("K")
V = TypeVar("V")
Holder = tuple[ApiKey, Tenant]
ReadNumber = Callable[[], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class AccessState:
    """What was known of changes at one moment: their number in the database, and how many this process has made."""

    number: int | None = None
    own_changes: int = 0


class AccessChanges:
    """Follows the changes of access and of limits: those of this process, and those of others by their number."""

    def __init__(self, clock: Clock, read_number: ReadNumber) -> None:
        """`read_number` returns the number of changes that are committed."""
        self._clock = clock
        self._read_number = read_number
        self._state = AccessState()
        self._confirmed_at = -_CONFIRMED_FOR_S

    @property
    def state(self) -> AccessState:
        """The present state. Take it before something is read from the database that is to be remembered."""
        return self._state

    @property
    def is_confirmed(self) -> bool:
        """Whether no change of another process can be unseen for longer than a second."""
        return self._clock.monotonic() - self._confirmed_at < _CONFIRMED_FOR_S

    async def poll(self) -> None:
        """Reads the number of changes. If it is new, all that is remembered must be read again."""
        began_at = self._clock.monotonic()
        number = await self._read_number()
        if number != self._state.number:
            self._state = AccessState(number, self._state.own_changes)
        self._confirmed_at = began_at

    def note_change(self) -> None:
        """Notes a change that this process has made. Call it after the change was committed."""
        self._state = AccessState(self._state.number, self._state.own_changes + 1)


class Remembered(Generic[K, V]):
    """Remembers what was read from the database while nothing has changed since. Holds the latest used entries."""

    def __init__(self, clock: Clock, changes: AccessChanges, most: int) -> None:
        """`most` is how many entries are held."""
        self._clock = clock
        self._changes = changes
        self._most = most
        self._entries: OrderedDict[K, tuple[V, AccessState, float]] = OrderedDict()

    def find(self, key: K) -> V | None:
        """Returns what is remembered, if nothing can have changed for longer than a second."""
        entry = self._entries.get(key)
        if entry is None or entry[1] is not self._changes.state or not self._changes.is_confirmed:
            return None
        if self._clock.monotonic() - entry[2] >= _KEPT_FOR_S:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def add(self, key: K, value: V, state: AccessState) -> None:
        """Remembers what was read. `state` is the state of changes before it was read."""
        self._entries[key] = value, state, self._clock.monotonic()
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


@dataclass(frozen=True, slots=True)
class VerifiedKey:
    """A key or a console ticket that was verified, with its holder at that time."""

    holder: Holder
    until: float | None
    """The time at which the ticket ends, in unix seconds. None for a key."""


VerifiedKeys = Remembered[bytes, VerifiedKey]
"""Verified keys by their digests."""
MOST_KEYS = 10_000


class RecentKeys:
    """Maps the keys that were right in the last ten seconds to their tenants. Holds 10,000 keys at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: OrderedDict[bytes, tuple[TenantId, float]] = OrderedDict()
        """The tenant of each key, and when the key was last right; least recently right first."""

    def tenant_of(self, key: str) -> TenantId | None:
        """Returns the tenant to whom the key belonged in the last ten seconds. None if no such key was right."""
        tenant_id, right_at = self._tenants.get(key_digest(key), (None, 0.0))
        return tenant_id if self._clock.monotonic() - right_at < RECENT_FOR_S else None

    def note_right(self, key: str, tenant_id: TenantId) -> None:
        """Remembers a key that has just been authenticated."""
        digest = key_digest(key)
        self._tenants[digest] = (tenant_id, self._clock.monotonic())
        self._tenants.move_to_end(digest)
        if len(self._tenants) > MOST_KEYS:
            self._tenants.popitem(last=False)

    def note_wrong(self, key: str) -> None:
        """Forgets a key that is not right, or no longer."""
        self._tenants.pop(key_digest(key), None)
