"""Remembers for a few seconds which tenant an API key belonged to, so that a request can be refused at once.

Owns the memory of one process. Never authenticates: who remembers a key here may use it to refuse a request, and never
to allow one. So a key that was revoked a moment ago can get a 429 instead of a 401, and nothing else.
Holds digests of keys, and never a key.
"""

from collections import OrderedDict

from graftwork.platform.clock import Clock
from graftwork.platform.ids import TenantId
from graftwork.platform.keys.keys import key_digest

_REMEMBERED_S = 10.0
_MOST_KEYS = 10_000


class RecentKeys:
    """Maps the keys that were right in the last ten seconds to their tenants. Holds 10,000 keys at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: OrderedDict[bytes, tuple[TenantId, float]] = OrderedDict()
        """The tenant of each key, and when the key was last right; least recently right first."""

    def tenant_of(self, key: str) -> TenantId | None:
        """Returns the tenant to whom the key belonged in the last ten seconds. None if no such key was right."""
        tenant_id, right_at = self._tenants.get(key_digest(key), (None, 0.0))
        return tenant_id if self._clock.monotonic() - right_at < _REMEMBERED_S else None

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
