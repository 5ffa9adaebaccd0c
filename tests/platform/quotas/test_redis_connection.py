"""Tests of limits behind Sentinels and in a cluster, with real servers of each kind, and of addresses that are wrong."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest, Unavailable
from graftwork.platform.ids import OrganisationId
from graftwork.platform.quotas.limits import Level, Limits, OwnerLimits
from graftwork.platform.quotas.quotas import Quota, RedisQuotaKeeper
from graftwork.platform.quotas.redis_connection import connect, redis_time
from tests.platform.quotas.test_quotas import ACME, ListedLedger, admitted, refusal_of
from tests.redis_process import RedisProcess, running_redis


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def started(*arguments: str) -> Iterator[None]:
    """A `redis-server` with these arguments, while the block runs. Skips the test where it is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server to start")
    process = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def primary() -> Iterator[RedisProcess]:
    with running_redis() as server:
        yield server


async def answers(port: int) -> None:
    """Returns once the server on the port answers."""
    async with asyncio.timeout(60), Redis(port=port) as redis:
        while True:
            try:
                await redis.ping()
                return
            except (OSError, RedisError):
                await asyncio.sleep(0.02)


async def make_cluster(port: int) -> None:
    """Makes a cluster of the one server on the port, and returns once it serves all slots."""
    async with asyncio.timeout(60), Redis(port=port, decode_responses=True) as redis:
        await redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
        while True:
            info = await redis.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
            if "cluster_state:ok" in str(info):
                return
            await asyncio.sleep(0.05)


def both_levels(quota: Quota) -> Limits:
    """Limits of an organisation and a tenant, whose keys must be in one slot."""
    owners = (OwnerLimits(Level.ORGANISATION, "org_1", quota), OwnerLimits(Level.TENANT, ACME, Quota()))
    return Limits(ACME, owners, OrganisationId("org_1"))


async def test_limits_follow_the_primary_that_sentinels_name(
    primary: RedisProcess, manual_clock: ManualClock, tmp_path: Path
) -> None:
    """With an address of Sentinels, limits are counted in the primary of the service, exactly."""
    port, of_primary = free_port(), primary.url.rpartition(":")[2].removesuffix("/0")
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor limits 127.0.0.1 {of_primary} 1\n")
    quota = both_levels(Quota(max_concurrent_requests=10))
    with started(str(config), "--sentinel"):
        await answers(port)
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/limits/0"
        keeper = RedisQuotaKeeper(url, "t:", manual_clock, ListedLedger())
        kept = await admitted([keeper.reserve(quota, 1) for _ in range(40)])
        await keeper.keep_alive()
        async with Redis.from_url(primary.url) as redis:
            in_primary = [key async for key in redis.scan_iter(match="t:*")]
        await keeper.close()

    assert len(kept) == 10
    assert len(in_primary) == 2 * 6
    assert await redis_time(primary.url, 5.0) > 1.7e9


async def test_limits_are_counted_in_a_cluster(manual_clock: ManualClock, tmp_path: Path) -> None:
    """In a cluster, which refuses scripts over several slots, limits of several levels are counted exactly."""
    port = free_port()
    quota = both_levels(Quota(requests_per_minute=10))
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
    with started(*options, "--cluster-enabled", "yes", "--cluster-port", str(free_port())):
        await answers(port)
        await make_cluster(port)
        url = f"redis+cluster://127.0.0.1:{port}/0"
        keeper = RedisQuotaKeeper(url, "t:", manual_clock, ListedLedger())
        await keeper.check_reachable()
        kept = await admitted([keeper.reserve(quota, 1) for _ in range(40)])
        await keeper.keep_alive()
        for reservation in kept:
            await reservation.refund()
        again = await admitted([keeper.reserve(quota, 1) for _ in range(40)])
        refused = await refusal_of(keeper.reserve(quota, 1))
        time = await redis_time(url, 5.0)
        await keeper.close()

    assert (len(kept), len(again)) == (10, 10)
    assert refused.details["level"] == Level.ORGANISATION
    assert time > 1.7e9


@pytest.mark.parametrize("scheme", ["redis+sentinel://127.0.0.1:1/limits", "redis+cluster://127.0.0.1:1/0"])
async def test_nobody_there_is_unavailable(scheme: str, manual_clock: ManualClock) -> None:
    """Sentinels or a cluster that do not answer are a 503 with a retry-after, so gateways count alone."""
    keeper = RedisQuotaKeeper(scheme, "t:", manual_clock, ListedLedger(), answer_within_s=0.5)
    with pytest.raises(Unavailable) as caught:
        await keeper.reserve(both_levels(Quota()), 1)

    assert caught.value.should_retry
    await keeper.close()


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://127.0.0.1", "redis+sentinel:///limits", "redis+sentinel://a:x/limits", "http://a", "redis"],
)
def test_wrong_addresses_are_named(url: str) -> None:
    """An address that is none of Redis is refused at the start, with the forms that there are."""
    with pytest.raises(InvalidRequest) as caught:
        connect(url, 1.0)

    assert caught.value.param == "redis_url"
    assert "redis+sentinel://" in caught.value.message
