"""Connects to the Redis of an address: one server, a primary that Sentinels name, or a cluster.

    redis://HOST:PORT/NUMBER, rediss://…                       one server; rediss is TLS
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/NUMBER        the primary of a service, wherever a failover puts it
    redis+cluster://HOST:PORT/0, rediss+cluster://…            a cluster

A user and a password before the hosts (`user:password@`) are those of Redis, and of the Sentinels too.
Owns the time limits and the number of connections. Connections are opened by the first command, not here.
"""

from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from graftwork.platform.errors import InvalidRequest, Unavailable

LIMITS_UNAVAILABLE = "limits_unavailable"
"""The code of the error when Redis does not answer."""
_MAX_CONNECTIONS = 32
_CONNECTION_WAIT_S = 20.0
_SENTINEL, _SENTINEL_PORT = "redis+sentinel", 26379
_CLUSTERS = {"redis+cluster": "redis", "rediss+cluster": "rediss"}

AnyRedis = Redis | RedisCluster
REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
"""What a Redis that does not answer raises."""


def connect(url: str, answer_within_s: float) -> AnyRedis:
    """Returns a client that opens its connections later. A command that gets no answer in `answer_within_s` seconds is
    sent once more, and then fails. Raises InvalidRequest if `url` is no address of Redis.
    """
    times = {"socket_timeout": answer_within_s, "socket_connect_timeout": answer_within_s}
    options: dict[str, Any] = {"decode_responses": True, "retry": Retry(NoBackoff(), 1), **times}
    scheme, _, rest = url.partition("://")
    try:
        if scheme == _SENTINEL:
            return _primary(url, options, times)
        if scheme in _CLUSTERS:
            return RedisCluster.from_url(f"{_CLUSTERS[scheme]}://{rest}", **options)
        pool = BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=_CONNECTION_WAIT_S, **options
        )
    except ValueError as error:
        raise InvalidRequest(
            f"redis_url: {error}. Give redis://HOST:PORT/NUMBER, rediss://… for TLS, "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT/0, or leave it out.",
            param="redis_url",
        ) from error
    return Redis.from_pool(pool)


def _primary(url: str, options: dict[str, Any], times: dict[str, float]) -> Redis:
    """Returns a client of the primary that the Sentinels of an address name. Raises ValueError for a wrong address."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    service, _, number = parts.path.strip("/").partition("/")
    if not service or not hosts or (number and not number.isdecimal()):
        raise ValueError("an address of Sentinels has hosts and the name of the service")
    user, _, password = login.partition(":")
    secrets = {"username": unquote(user) or None, "password": unquote(password) or None}
    sentinels = [_host(host) for host in hosts.split(",")]
    sentinel = Sentinel(sentinels, sentinel_kwargs={**secrets, **times}, **secrets)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(service, db=int(number or 0), **options)
    return client


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host")
    return parts.hostname, parts.port or _SENTINEL_PORT


async def close(redis: AnyRedis) -> None:
    """Closes all connections of a client, those to Sentinels too, which the client itself leaves open."""
    await redis.aclose()
    pool = redis.connection_pool if isinstance(redis, Redis) else None
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def not_usable(error: Exception) -> Unavailable:
    """Returns the error for a Redis that cannot be used, with what to do."""
    return Unavailable(
        f"Redis cannot be used ({error}): start it, correct --redis-url, or leave it out.", code=LIMITS_UNAVAILABLE
    )


async def redis_time(url: str, within_s: float) -> float:
    """Returns the time of the Redis at `url`, in unix seconds.

    Raises InvalidRequest for a wrong address, and Unavailable if Redis does not answer in `within_s` seconds.
    """
    redis = connect(url, within_s)
    try:
        found: Any = await redis.time()
        seconds, microseconds = next(iter(found.values())) if isinstance(found, dict) else found  # a cluster's by node
        return float(seconds) + float(microseconds) / 1e6
    except REDIS_ERRORS as error:
        raise not_usable(error) from error
    finally:
        await close(redis)
