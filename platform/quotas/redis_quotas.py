"""Counts in Redis how much of its limits each tenant has used. The counts are exact for any number of gateways.

One Lua script (quotas.lua) checks and counts in one step. It uses the time of Redis, so the clocks of the gateways do
not matter. Each running request takes one of the slots that its tenant's limit of running requests allows. If a gateway
dies, the slots of its requests become free after `SLOT_LIFE_S` seconds.
"""

import logging
from dataclasses import dataclass
from importlib.resources import files

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError

from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest, Unavailable
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.quotas.quota import WINDOW_S, MonthlyBudget, Quota, Standing, TokenLedger, limit_exceeded

SLOT_LIFE_S = 900.0
"""The seconds for which a running request keeps its slot. A longer request loses the slot, so one more request may
start.
"""

_KEY_NAMES = ("log", "tokens", "running", "held", "sums", "answers")
_MAX_CONNECTIONS = 32
_CONNECTION_WAIT_S = 20.0

logger = logging.getLogger(__name__)


class _Script:
    """Runs quotas.lua for any tenant. Times are in whole microseconds."""

    def __init__(self, redis: Redis, prefix: str, clock: Clock | None) -> None:
        source = files("graftwork").joinpath("platform", "quotas", "quotas.lua").read_text()
        self._run = redis.register_script(source)
        self._prefix = prefix
        self._clock = clock

    async def __call__(self, verb: str, tenant_id: TenantId, entry_id: str, *arguments: str) -> object:
        """Runs `verb` on one tenant's keys. Raises Unavailable when Redis does not answer."""
        keys = [f"{self._prefix}quota:{{{tenant_id}}}:{name}" for name in _KEY_NAMES]
        now = "" if self._clock is None else _microseconds(self._clock.monotonic())
        fixed = [verb, now, _microseconds(WINDOW_S), _microseconds(SLOT_LIFE_S), entry_id]
        try:
            answer: object = await self._run(keys=keys, args=[*fixed, *arguments])
        except RedisError as error:
            message = "The limits cannot be checked at present; send the request again shortly."
            raise Unavailable(message, code="limits_unavailable", retry_after_s=1.0) from error
        return answer


@dataclass(frozen=True, slots=True)
class RedisReservation:
    """One request's reservation in `RedisQuotaKeeper`. Implements `Reservation`."""

    entry_id: str
    tenant_id: TenantId
    quota: Quota
    standing: Standing
    script: _Script

    def rate_limit_headers(self) -> dict[str, str]:
        return self.standing.headers(self.quota)

    async def settle(self, actual_tokens: int) -> None:
        await self._finish("settle", str(actual_tokens))

    async def refund(self) -> None:
        await self._finish("refund", "")

    async def _finish(self, verb: str, tokens: str) -> None:
        try:
            await self.script(verb, self.tenant_id, self.entry_id, tokens)
        except Unavailable:
            # The request is done and must not fail now. Its slot ends by itself, and its estimate stays counted.
            logger.warning("quota %s lost", verb, extra={"tenant_id": self.tenant_id}, exc_info=True)


class RedisQuotaKeeper:
    """Implements `QuotaKeeper` for several gateways, which count together in one Redis."""

    def __init__(
        self, redis_url: str, prefix: str, clock: Clock, ledger: TokenLedger, *, window_clock: Clock | None = None
    ) -> None:
        """`clock` determines the present month. `window_clock` replaces Redis's own time in tests.

        Raises InvalidRequest if `redis_url` is no address of Redis.
        """
        try:
            pool = BlockingConnectionPool.from_url(
                redis_url, max_connections=_MAX_CONNECTIONS, timeout=_CONNECTION_WAIT_S, decode_responses=True
            )
        except ValueError as error:
            raise InvalidRequest(
                f"redis_url: {error}. Give redis://HOST:PORT/NUMBER, rediss://… for TLS, or leave it out.",
                param="redis_url",
            ) from error
        self._redis = Redis.from_pool(pool)
        self._script = _Script(self._redis, prefix, window_clock)
        self._budget = MonthlyBudget(ledger, clock)

    async def check_reachable(self) -> None:
        """Checks that Redis answers. Raises Unavailable with the reason if it does not."""
        try:
            await self._redis.ping()
        except (RedisError, OSError) as error:
            raise Unavailable(
                f"Redis cannot be used ({error}): start it, correct --redis-url, or leave it out.",
                code="limits_unavailable",
            ) from error

    async def reserve(
        self, tenant_id: TenantId, quota: Quota, estimated_tokens: int, answers: int = 1
    ) -> RedisReservation:
        entry_id = new_id("rsv")
        limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.max_concurrent_requests)
        arguments = ["" if limit is None else str(limit) for limit in limits]
        answer = await self._script("reserve", tenant_id, entry_id, str(estimated_tokens), *arguments, str(answers))
        assert isinstance(answer, list)
        limit, wait, requests, window_tokens, empty_in, held_tokens = answer
        standing = Standing(int(requests), int(window_tokens), _seconds(empty_in))
        if limit:
            raise limit_exceeded(quota, limit, _seconds(wait) if wait else None, standing)
        reservation = RedisReservation(entry_id, tenant_id, quota, standing, self._script)
        await self._budget.check(tenant_id, quota, int(held_tokens), reservation)
        return reservation

    async def close(self) -> None:
        """Closes all connections to Redis."""
        await self._redis.aclose()


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1_000_000))


def _seconds(microseconds: str) -> float:
    return int(microseconds) / 1_000_000
