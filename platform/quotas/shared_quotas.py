"""Counts limits in Redis, and while Redis does not answer in this process: each gateway with its part of each limit.

    Redis answers      every reservation is made there, and noted here as well
    Redis is silent    every reservation is made here, against limit / gateways; its end is kept to be sent
    Redis is back      `keep_alive` tells it of all requests that run, also those that were admitted without it

So an outage neither opens the limits nor shuts the server. Because what this gateway has admitted in the last minute is
always noted here, the limit holds from the first request of an outage on. What other gateways have admitted is unknown
here: at the begin of an outage, an owner of limits whose requests came over few gateways may have up to twice its limit.
Owns the decision which of the two counts. Only `keep_alive` asks a silent Redis again, so no request waits for it.
Invariant: a reservation is ended in both counts.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from graftwork.platform.errors import Unavailable
from graftwork.platform.quotas.budget import ReservedCost
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.local_quotas import LocalQuotaKeeper, LocalReservation
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.redis_connection import LIMITS_UNAVAILABLE
from graftwork.platform.quotas.redis_quotas import RedisQuotaKeeper, RedisReservation

_PER_GATEWAY = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
"""The limits that are counted together. The tokens of a month are in the database, which all gateways read."""

logger = logging.getLogger(__name__)
CountGateways = Callable[[], Awaitable[int]]


def part_of(quota: Quota, gateways: int) -> Quota:
    """Returns one gateway's part of the limits. A limit above 0 leaves each gateway at least 1."""
    limits = quota.as_mapping()
    parts = {name: limits[name] for name in _PER_GATEWAY}
    return quota.model_copy(
        update={name: max(limit // gateways, min(limit, 1)) for name, limit in parts.items() if isinstance(limit, int)}
    )


def parts_of(limits: Limits, gateways: int) -> Limits:
    """Returns one gateway's part of the limits of each owner."""
    return replace(
        limits, owners=tuple(replace(owner, quota=part_of(owner.quota, gateways)) for owner in limits.owners)
    )


@dataclass(frozen=True, slots=True, eq=False)
class SharedReservation:
    """A reservation that counts in Redis and here. Implements `Reservation`."""

    in_redis: RedisReservation
    here: LocalReservation
    headers: dict[str, str]

    def rate_limit_headers(self) -> dict[str, str]:
        return self.headers

    async def settle(self, actual_tokens: int) -> None:
        await self.here.settle(actual_tokens)
        await self.in_redis.settle(actual_tokens)

    async def refund(self) -> None:
        await self.here.refund()
        await self.in_redis.refund()


class SharedQuotaKeeper:
    """Implements `QuotaKeeper` for several gateways with one Redis, which may fail."""

    def __init__(self, redis: RedisQuotaKeeper, local: LocalQuotaKeeper, count_gateways: CountGateways) -> None:
        """`count_gateways` returns how many gateways run, at least 1."""
        self._redis = redis
        self._local = local
        self._count_gateways = count_gateways
        self._gateways = 1

    @property
    def is_alone(self) -> bool:
        """Whether this gateway counts alone, because Redis does not answer."""
        return self._redis.is_silent

    async def reserve(
        self, limits: Limits, estimated_tokens: int, answers: int = 1, cost: ReservedCost | None = None
    ) -> SharedReservation:
        if not self.is_alone:
            try:
                shared = await self._redis.reserve(limits, estimated_tokens, answers, cost)
            except Unavailable as error:
                if error.code != LIMITS_UNAVAILABLE:
                    raise
                self._begin_alone(error)
            else:
                noted = self._local.note(limits, estimated_tokens, answers, cost)
                return SharedReservation(shared, noted, shared.rate_limit_headers())
        here = await self._local.reserve(parts_of(limits, self._gateways), estimated_tokens, answers, cost)
        adopted = self._redis.adopt(limits, estimated_tokens, answers, cost)
        return SharedReservation(adopted, here, here.rate_limit_headers())

    async def keep_alive(self) -> None:
        """Renews the places of the requests that run, counts the gateways, and asks a silent Redis again."""
        await self._local.keep_alive()
        was_alone = self.is_alone
        if await self._redis.renew() and was_alone and await self._redis.is_reachable():
            self._redis.is_silent = False
            logger.warning("limits are counted in Redis again")
        try:
            self._gateways = max(1, await self._count_gateways())
        except Unavailable:
            logger.warning("the gateways were not counted", extra={"gateways": self._gateways})

    async def close(self) -> None:
        await self._redis.close()

    def _begin_alone(self, error: Unavailable) -> None:
        if not self.is_alone:
            logger.warning(
                "Redis does not answer: limits are counted in this process, with a part of each",
                extra={"gateways": self._gateways, "reason": str(error.__cause__)},
            )
        self._redis.is_silent = True
