"""Limits the uploads that a gateway receives at the same time, because each needs room on its disk.

Owns the counts of this gateway. Never counts the uploads of other gateways. An upload has its place from before its body
is read until it is answered.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.ids import TenantId

_RETRY_AFTER_S = 5.0


class UploadBound:
    """Counts the uploads that each tenant has in flight. Use it in one event loop only."""

    def __init__(self, max_total: int, max_tenant: int) -> None:
        """`max_total` and `max_tenant` are the most uploads of all tenants and of one tenant."""
        self._max_total = max_total
        self._max_tenant = max_tenant
        self._held: Counter[TenantId] = Counter()

    @contextmanager
    def place(self, tenant_id: TenantId) -> Generator[None]:
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
            yield
        finally:
            self._held[tenant_id] -= 1
            if not self._held[tenant_id]:
                del self._held[tenant_id]
