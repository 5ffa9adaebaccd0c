"""Bounds how many lines of batches this gateway answers at the same time: in total, and for each tenant.

Owns the counts. Waiting lines get their places in the order in which they came, except that a tenant with all its places
is passed over. Use it in one event loop only.
"""

import asyncio
from collections import Counter

from graftwork.platform.ids import TenantId


class LineSlots:
    """The places of running lines."""

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total = total
        self._per_tenant = per_tenant
        self._held: Counter[TenantId] = Counter()
        self._changed = asyncio.Condition()

    @property
    def num_held(self) -> int:
        return self._held.total()

    async def take(self, tenant_id: TenantId, most: int | None, stop: asyncio.Event) -> bool:
        """Waits for a place. Returns False without one if `stop` is set first; see `wake`.

        `most` is the most places that the tenant may have at present, if that is less than every tenant's.
        """
        limit = self._per_tenant if most is None else min(most, self._per_tenant)

        def is_over() -> bool:
            return stop.is_set() or (self._held[tenant_id] < limit and self._held.total() < self._total)

        async with self._changed:
            await self._changed.wait_for(is_over)
            if stop.is_set():
                return False
            self._held[tenant_id] += 1
            return True

    async def give_back(self, tenant_id: TenantId) -> None:
        self._held[tenant_id] -= 1
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        await self.wake()

    async def wake(self) -> None:
        """Lets all that wait look at their `stop`."""
        async with self._changed:
            self._changed.notify_all()
