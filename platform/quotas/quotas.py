"""Defines the interface of quota keepers. A request reserves a part of the limits of its owners before it runs: those of
its organisation, tenant, key and end user (see `limits.py`).

    reserve ──► settle(actual)   the request was served; the reserved tokens that it did not use are given back
            └─► refund()         the request was not served, and counts as if it had never been reserved

These invariants hold for any number of simultaneous requests. In every span of 60 seconds, an owner has at most as many
requests and tokens as its limits allow; a request counts with its estimated tokens until it is settled, and then with
its actual tokens. The number of an owner's running requests never exceeds its limit, nor do its tokens and its money of
one month. A refused reservation changes no count of any owner.

A reservation's places are a lease that `keep_alive` renews. So no place stays taken for longer than a lease after its
gateway has died, or after its request was lost.
"""

from typing import Protocol

from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable
from graftwork.platform.quotas.budget import ReservedCost, SpendLedger
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.local_quotas import LocalQuotaKeeper
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.redis_quotas import RedisQuotaKeeper
from graftwork.platform.quotas.shared_quotas import CountGateways, SharedQuotaKeeper

__all__ = ["LocalQuotaKeeper", "Quota", "QuotaKeeper", "RedisQuotaKeeper", "Reservation", "open_quotas"]

_REDIS_PREFIX = "graftwork:"


class Reservation(Protocol):
    """The part of its owners' limits that one request has reserved: one request, its tokens, its cost, and one place for
    each answer among the running requests.

    End the reservation with one call of `settle` or `refund`. Further calls of either method have no effect.
    """

    def rate_limit_headers(self) -> dict[str, str]:
        """Returns the `x-ratelimit-*` headers with the limits of the owner with least left, and what was left of them when
        the reservation was made.
        """
        ...

    async def settle(self, actual_tokens: int) -> None:
        """Ends the reservation of a served request. `actual_tokens` (prompt and completion) replaces the estimate.

        Write the request's usage record before this call.
        """
        ...

    async def refund(self) -> None:
        """Ends the reservation of a request that was not served. The request then does not count for any limit."""
        ...


class QuotaKeeper(Protocol):
    """Checks requests against the limits of their owners and counts them. One class counts in this process, another in
    Redis.
    """

    async def reserve(
        self, limits: Limits, estimated_tokens: int, answers: int = 1, cost: ReservedCost | None = None
    ) -> Reservation:
        """Counts one request with its estimated tokens and its highest cost, and reserves one of the places of
        `max_concurrent_requests` for each of its answers, for each of its owners. `cost` is None without a price.

        If the request would exceed a limit, changes no count and raises LimitExceeded. The error has the time in
        seconds after which an equal request fits; for `max_concurrent_requests`, this time is a guess. Raises
        BudgetSpent if the request would exceed the tokens or the money of the month.
        """
        ...

    async def keep_alive(self) -> None:
        """Renews the places of the requests that run. Call it several times in the length of a lease.

        A reservation that nobody refers to any more is not renewed. Sends again the ends of reservations that could not
        be sent before. If that is still not possible, logs a warning.
        """
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


async def open_quotas(
    redis_url: str | None, clock: Clock, ledger: SpendLedger, lease_s: float, count_gateways: CountGateways
) -> QuotaKeeper:
    """Returns the quota keeper that counts in the Redis at `redis_url`, or in this process for None.

    `count_gateways` returns how many gateways run: their parts of the limits hold while Redis does not answer. Raises InvalidRequest for a wrong address of Redis, and Unavailable if Redis does not answer.
    """
    if redis_url is None:
        return LocalQuotaKeeper(clock, ledger)
    keeper = RedisQuotaKeeper(redis_url, _REDIS_PREFIX, clock, ledger, lease_s=lease_s)
    try:
        await keeper.check_reachable()
    except Unavailable:
        await keeper.close()
        raise
    return SharedQuotaKeeper(keeper, LocalQuotaKeeper(clock, ledger), count_gateways)
