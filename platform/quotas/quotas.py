"""The quota keeper: reserve before the work, settle or refund after it.

    reserve ──► settle(actual)   the request was served; what it did not use is given back
            └─► refund()         the request was not served; as if it had never been asked for

Invariants, under any concurrency: no 60 seconds hold more requests or tokens than the limit (tokens as estimated,
then as settled), no moment more running requests, no month more tokens. A refused reservation takes nothing.
"""

from typing import Protocol

from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.local_quotas import LocalQuotaKeeper
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.redis_quotas import RedisQuotaKeeper

__all__ = ["LocalQuotaKeeper", "Quota", "QuotaKeeper", "RedisQuotaKeeper", "Reservation"]


class Reservation(Protocol):
    """What one request takes from its tenant's limits, until it is settled or refunded. Only the first call counts."""

    def rate_limit_headers(self) -> dict[str, str]:
        """The `x-ratelimit-*` headers as of the reservation."""
        ...

    async def settle(self, actual_tokens: int) -> None:
        """End it with the number of tokens that were really used. Write the usage row before this call."""
        ...

    async def refund(self) -> None:
        """End it as if it had never been made."""
        ...


class QuotaKeeper(Protocol):
    """Counts reservations, in this process or in Redis."""

    async def reserve(self, tenant_id: TenantId, quota: Quota, estimated_tokens: int) -> Reservation:
        """Take one request, its tokens and a running slot, all or nothing.

        Raises LimitExceeded with the exact seconds after which the same request fits, BudgetSpent when the
        month's tokens do not suffice.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Open reservations end by themselves, after `SLOT_LIFE_S` at most."""
        ...
