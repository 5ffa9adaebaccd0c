"""Remembers the keys that this process has verified, so that a request with one of them reads no database.

Owns the memory of one process. It holds digests of keys, and never a key. A remembered key is used only while these
hold:

- the number of changes of access in the database (see `key_rows.py`) is what it was before the key was read,
- a read of this number that began less than `_CONFIRMED_FOR_S` ago has confirmed it,
- the key was read less than `_KEPT_FOR_S` ago.

So a change on another gateway takes effect here within a second, also if the database does not answer: then each
request asks for its key again, as without this memory. A change of this process takes effect at once.
Without `poll`, nothing is ever confirmed, and every key is read.

RecentKeys knows less: which tenant a key belonged to seconds ago, so that a request can be refused at once. It never
allows one. So a key that was revoked a moment ago can get a 429 instead of a 401, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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
_MOST_KEYS = 10_000

Holder = tuple[ApiKey, Tenant]
ReadNumber = Callable[[], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class AccessState:
    """What was known of changes at one moment: their number in the database, and how many this process has made."""

    number: int | None = None
    own_changes: int = 0


@dataclass(frozen=True, slots=True)
class VerifiedKey:
    """A key or a console ticket that was verified, with its holder at that time."""

    holder: Holder
    until: float | None
    """The time at which the ticket ends, in unix seconds. None for a key."""
    state: AccessState
    read_at: float


class VerifiedKeys:
    """Maps digests of verified keys to their holders. Holds 10,000 keys at most, the latest used ones."""

    def __init__(self, clock: Clock, read_number: ReadNumber) -> None:
        """`read_number` returns the number of changes of access that are committed."""
        self._clock = clock
        self._read_number = read_number
        self._keys: OrderedDict[bytes, VerifiedKey] = OrderedDict()
        self._state = AccessState()
        self._confirmed_at = -_CONFIRMED_FOR_S

    @property
    def state(self) -> AccessState:
        """The present state. Take it before a key is read from the database, and give it to `add`."""
        return self._state

    async def poll(self) -> None:
        """Reads the number of changes. If it is new, all remembered keys must be read again."""
        began_at = self._clock.monotonic()
        number = await self._read_number()
        if number != self._state.number:
            self._state = AccessState(number, self._state.own_changes)
        self._confirmed_at = began_at

    def note_change(self) -> None:
        """Notes that this process has changed who has access. Call it after the change was committed."""
        self._state = AccessState(self._state.number, self._state.own_changes + 1)

    def find(self, digest: bytes) -> VerifiedKey | None:
        """Returns the remembered key with this digest, if nothing can have changed for longer than a second."""
        found, now = self._keys.get(digest), self._clock.monotonic()
        if found is None or found.state is not self._state or now - self._confirmed_at >= _CONFIRMED_FOR_S:
            return None
        if now - found.read_at >= _KEPT_FOR_S:
            return None
        self._keys.move_to_end(digest)
        return found

    def add(self, digest: bytes, holder: Holder, until: float | None, state: AccessState) -> None:
        """Remembers a verified key. `state` is the state before its row was read."""
        self._keys[digest] = VerifiedKey(holder, until, state, self._clock.monotonic())
        self._keys.move_to_end(digest)
        if len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)


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
        if len(self._tenants) > _MOST_KEYS:
            self._tenants.popitem(last=False)

    def note_wrong(self, key: str) -> None:
        """Forgets a key that is not right, or no longer."""
        self._tenants.pop(key_digest(key), None)
