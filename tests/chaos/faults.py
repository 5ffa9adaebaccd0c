"""The faults: each strikes a fleet, holds for some seconds, and heals."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from tests.chaos.fleet import Fleet, Process

HOLD_S = 8.0
"""How long a fault lasts that is not over at once: longer than `engine_silence_s`."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `strike` returns when it is healed."""

    name: str
    strike: Callable[[Fleet], Awaitable[None]]


async def _kill_engine(fleet: Fleet) -> None:
    fleet.engine.kill()
    fleet.engine.start()


def _kill_gateway(number: int) -> Callable[[Fleet], Awaitable[None]]:
    async def strike(fleet: Fleet) -> None:
        fleet.gateways[number].kill()
        fleet.gateways[number].start()

    return strike


async def _stop(process: Process) -> None:
    process.signal(signal.SIGSTOP)
    await asyncio.sleep(HOLD_S)
    process.signal(signal.SIGCONT)


async def _cut_connections(fleet: Fleet) -> None:
    """Ends every connection to the database, several times in a row."""
    for _ in range(6):
        await fleet.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.5)


async def _stall_database(fleet: Fleet) -> None:
    """Holds a lock on every table, so that nothing is read or written."""
    connection = await asyncpg.connect(fleet.database_url)
    try:
        async with connection.transaction():
            tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
            names = ", ".join(f'"{row["tablename"]}"' for row in tables)
            await connection.execute(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
            await asyncio.sleep(HOLD_S)
    finally:
        await connection.close()


async def _make_read_only(fleet: Fleet) -> None:
    """Lets the database take no writes, as after a failover to a replica."""
    name = fleet.database_url.rsplit("/", 1)[1]
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()"
    server = await asyncpg.connect(fleet.database_url.rsplit("/", 1)[0] + "/postgres")
    try:
        await server.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        await server.fetch(end, name)
        await asyncio.sleep(HOLD_S)
        await server.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        await server.fetch(end, name)
    finally:
        await server.close()


async def _kill_redis(fleet: Fleet) -> None:
    """Kills Redis, which forgets everything."""
    fleet.redis.kill()
    await asyncio.sleep(2)
    fleet.redis.start()
    await fleet.redis_answers()


FAULTS = (
    Fault("the engine is killed", _kill_engine),
    Fault("the first gateway is killed", _kill_gateway(0)),
    Fault("the second gateway is killed", _kill_gateway(1)),
    Fault("the engine is stopped for a while", lambda fleet: _stop(fleet.engine)),
    Fault("a gateway is stopped for a while", lambda fleet: _stop(fleet.gateways[1])),
    Fault("all connections to the database are cut", _cut_connections),
    Fault("the database stalls", _stall_database),
    Fault("the database takes no writes", _make_read_only),
    Fault("Redis stalls", lambda fleet: _stop(fleet.redis)),
    Fault("Redis is killed", _kill_redis),
)


def full_disk(folder: Path) -> Fault:
    """Returns the fault that the disk of `folder` has no room for a while."""

    async def strike(fleet: Fleet) -> None:
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        await asyncio.sleep(HOLD_S)
        filler.unlink()

    return Fault("the disk is full for a while", strike)
