"""Limits the uploads that a gateway receives at the same time, because each needs room on its disk.

Owns the counts of this gateway. Never counts the uploads of other gateways. An upload has its place from before its body
is read until it is answered. The place is a lease: it is lost if the body has not arrived after a limited time, so that
nobody holds a place by sending slowly.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, RequestTimeout, Unavailable
from graftwork.platform.ids import TenantId

_RETRY_AFTER_S = 5.0


class UploadPlace:
    """The place of one upload. It is a lease for the time in which the body must arrive."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._ends_at = clock.monotonic() + lease_s

    def check(self) -> None:
        """Call this for each part of the body. Raises RequestTimeout (408) after the end of the lease."""
        if self._clock.monotonic() > self._ends_at:
            raise RequestTimeout(
                f"The upload took longer than the {self._lease_s:g} s in which it must arrive: send it over a faster "
                "connection."
            )


class UploadBound:
    """Counts the uploads that each tenant has in flight. Use it in one event loop only."""

    def __init__(self, max_total: int, max_tenant: int, clock: Clock, lease_s: float) -> None:
        """`max_total` and `max_tenant` are the most uploads of all tenants and of one tenant. The body of each must
        arrive within `lease_s` seconds.
        """
        self._clock = clock
        self._lease_s = lease_s
        self._max_total = max_total
        self._max_tenant = max_tenant
        self._held: Counter[TenantId] = Counter()

    @contextmanager
    def place(self, tenant_id: TenantId) -> Generator[UploadPlace]:
        """Holds a place for one upload during the `with` block.

        Raises CapacityContended (429) if the tenant has too many uploads in flight, and Unavailable (503) if all tenants
        together have too many.
        """
        if self._held[tenant_id] >= self._max_tenant:
            raise CapacityContended(
                f"{self._held[tenant_id]} of your uploads are under way, and at most {self._max_tenant} may be at a time: "
                "wait until one of them ends, then send this one again.",
                code="too_many_uploads",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._held.total() >= self._max_total:
            raise Unavailable(
                f"This server receives {self._max_total} uploads, and takes no more at a time: send this one again "
                "later.",
                code="too_many_uploads",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._held[tenant_id] += 1
        try:
            yield UploadPlace(self._clock, self._lease_s)
        finally:
            self._held[tenant_id] -= 1
            if not self._held[tenant_id]:
                del self._held[tenant_id]
