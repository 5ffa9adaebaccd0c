"""Tests that gateways and engines reach PostgreSQL and Redis over TLS alone, with servers that a test starts."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text

from graftwork.api.cli.chaos.stores import Stores, server_stores
from graftwork.api.cli.demo.server import free_port
from graftwork.platform.clock import ManualClock, SystemClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.quotas.quotas import Quota, RedisQuotaKeeper
from graftwork.platform.quotas.redis_quotas import redis_time
from graftwork.platform.replicas.lease import ReplicaLeases
from tests.certificates import Authority
from tests.platform.quotas.test_quotas import ACME, ListedLedger, refusal_of

_HOST = "localhost"
"""The name in the servers' certificate."""
_SHOWN_CIPHER = "SELECT cipher FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl"
_WITHIN_S = 10.0


@dataclass(frozen=True)
class TlsStores:
    """A PostgreSQL and a Redis that answer over TLS alone."""

    postgres_port: int
    redis_port: int
    ca: Path
    """The authority that has signed the servers' certificate."""
    foreign_ca: Path

    def database(self, parameters: str, host: str = _HOST) -> Database:
        return Database(f"postgresql+asyncpg://postgres@{host}:{self.postgres_port}/postgres?{parameters}")

    def redis_url(self, parameters: str = "", host: str = _HOST, scheme: str = "rediss") -> str:
        return f"{scheme}://{host}:{self.redis_port}/0?{parameters}"


@pytest.fixture(scope="module")
def stores() -> Iterator[TlsStores]:
    """Both servers, which refuse connections without TLS."""
    folder = Path(tempfile.mkdtemp(prefix="graftwork-tls-"))  # PostgreSQL's user may not enter pytest's folders
    servers = server_stores(folder)
    if servers is None:
        shutil.rmtree(folder)
        pytest.skip("this machine lacks the programs of PostgreSQL or Redis")
    authority, foreign = Authority(folder, "ours"), Authority(folder, "foreign")
    files = authority.issue("stores", dns=_HOST)
    postgres_port = _demand_tls(servers, files.cert, files.key)
    redis_port = _redis_with_tls(servers, files.cert, files.key, authority.ca)
    found = TlsStores(postgres_port, redis_port, authority.ca, foreign.ca)
    try:
        asyncio.run(_started(servers, found))
        yield found
    finally:
        for process in servers.processes:
            if process.is_running:
                process.kill()
        shutil.rmtree(folder)


def _demand_tls(servers: Stores, cert: Path, key: Path) -> int:
    """Lets PostgreSQL refuse connections without TLS. Returns its port."""
    assert servers.postgres is not None
    home = Path(servers.postgres.command[2])
    for source, name in ((cert, "server.crt"), (key, "server.key")):
        copy = home / name
        shutil.copy(source, copy)
        copy.chmod(0o600)
        if servers.postgres.user is not None:
            shutil.chown(copy, servers.postgres.user)
    (home / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 trust\n")
    servers.postgres.command = [*servers.postgres.command, "-c", "ssl=on"]
    return int(servers.database_url.rsplit(":", 1)[1].split("/")[0])


def _redis_with_tls(servers: Stores, cert: Path, key: Path, ca: Path) -> int:
    """Lets Redis listen with TLS alone. Returns its port."""
    assert servers.redis is not None
    port, command = free_port(), [*servers.redis.command]
    command[command.index("--port") + 1] = "0"
    files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca))
    servers.redis.command = [*command, "--tls-port", str(port), "--tls-auth-clients", "no", *files]
    return port


async def _started(servers: Stores, found: TlsStores) -> None:
    """Returns once both servers answer over TLS."""
    for process in servers.processes:
        process.start()
    async with asyncio.timeout(60):
        while True:
            database = found.database(f"sslmode=verify-full&sslrootcert={found.ca}")
            try:
                async with database.read() as session:
                    await session.scalar(text("SELECT 1"))
                await redis_time(found.redis_url(f"ssl_ca_certs={found.ca}"), 1.0)
                return
            except Unavailable:
                assert all(one.is_running for one in servers.processes), [one.log for one in servers.processes]
                await asyncio.sleep(0.05)
            finally:
                await database.close()


async def problem_of(database: Database) -> str:
    """The reason for which a database cannot be used."""
    with pytest.raises(Unavailable) as refused:
        await database.upgrade_to_head()
    await database.close()
    return refused.value.message


@pytest.mark.postgres
async def test_all_of_a_database_goes_over_tls(stores: TlsStores) -> None:
    """Migrations and an engine's lease work at a server that refuses plain connections, and the server says that the
    connection is encrypted.
    """
    database = stores.database(f"sslmode=verify-full&sslrootcert={stores.ca}")
    try:
        await database.upgrade_to_head()
        leases = ReplicaLeases(database, 10.0, SystemClock())
        engine = await leases.claim("one", "engine:9000")
        async with database.read() as session:
            cipher = await session.scalar(text(_SHOWN_CIPHER))
        assert await leases.present() == [engine]
    finally:
        await database.close()

    assert cipher is not None


@pytest.mark.postgres
async def test_a_database_that_cannot_prove_its_name_gets_nothing(stores: TlsStores) -> None:
    """A certificate of another authority, or of another host, is refused, and so is a connection without TLS."""
    foreign = await problem_of(stores.database(f"sslmode=verify-full&sslrootcert={stores.foreign_ca}"))
    other_host = await problem_of(stores.database(f"sslmode=verify-full&sslrootcert={stores.ca}", "127.0.0.1"))
    plain = await problem_of(stores.database("sslmode=disable"))

    assert "CERTIFICATE_VERIFY_FAILED" in foreign
    assert "127.0.0.1" in other_host
    assert "pg_hba.conf" in plain


@pytest.mark.redis
async def test_limits_are_shared_over_tls(stores: TlsStores, manual_clock: ManualClock) -> None:
    """Two gateways share one limit in a Redis that answers over TLS alone."""
    url, quota = stores.redis_url(f"ssl_ca_certs={stores.ca}"), Quota(requests_per_minute=2)
    first, second = (RedisQuotaKeeper(url, "tls:", manual_clock, ListedLedger()) for _ in range(2))
    try:
        await first.reserve(ACME, quota, 1)
        await second.reserve(ACME, quota, 1)
        refusal = await refusal_of(first.reserve(ACME, quota, 1))
    finally:
        await first.close()
        await second.close()

    assert refusal.retry_after_s is not None


@pytest.mark.redis
async def test_a_redis_that_cannot_prove_its_name_gets_nothing(stores: TlsStores) -> None:
    """A certificate of another authority, or of another host, is refused, and so is a connection without TLS."""
    for url, told in (
        (stores.redis_url(f"ssl_ca_certs={stores.foreign_ca}"), "CERTIFICATE_VERIFY_FAILED"),
        (stores.redis_url(f"ssl_ca_certs={stores.ca}", "127.0.0.1"), "CERTIFICATE_VERIFY_FAILED"),
        (stores.redis_url(scheme="redis"), "Redis cannot be used"),
    ):
        with pytest.raises(Unavailable, match=told):
            await redis_time(url, _WITHIN_S)
