"""Defines the quota keeper: a request's use is reserved before the work, and settled or refunded after it.

    reserve ──► settle(actual)   the request was served; reserved tokens that it did not use are given back
            └─► refund()         the request was not served, and counts as if it had never been reserved

Invariants, also with many requests at once: no span of 60 seconds has more requests or tokens than the limit (tokens as
estimated, then as settled). The limit of running requests is never passed. No month has more tokens than its limit. A
refused reservation takes nothing.
"""

from typing import Protocol

from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.local_quotas import LocalQuotaKeeper
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.redis_quotas import RedisQuotaKeeper

__all__ = ["LocalQuotaKeeper", "Quota", "QuotaKeeper", "RedisQuotaKeeper", "Reservation"]


class Reservation(Protocol):
    """The part of a tenant's limits that one request takes, until the reservation is settled or refunded.

    After the first call of `settle` or `refund`, further calls of either have no effect.
    """

    def rate_limit_headers(self) -> dict[str, str]:
        """Returns the `x-ratelimit-*` headers, with the values at the time of the reservation."""
        ...

    async def settle(self, actual_tokens: int) -> None:
        """Ends the reservation with the number of tokens really used. Write the usage row before this call."""
        ...

    async def refund(self) -> None:
        """Ends the reservation as if it had never been made."""
        ...


class QuotaKeeper(Protocol):
    """Counts reservations, in this process or in Redis."""

    async def reserve(self, tenant_id: TenantId, quota: Quota, estimated_tokens: int, answers: int = 1) -> Reservation:
        """Reserves one request, its tokens and a place of `max_concurrent_requests` for each of its answers.

        Reserves all of them or nothing.

        Raises LimitExceeded with the exact seconds after which an equal request fits. Raises BudgetSpent if the
        month's tokens do not suffice.
        """
        ...

    async def close(self) -> None:
        """Closes the connections. Open reservations end by themselves, after `SLOT_LIFE_S` at most."""
        ...
