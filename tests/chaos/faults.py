"""The faults of the database, of Redis and of the disk, beside those of the processes."""

import asyncio
import contextlib
from pathlib import Path

import asyncpg

from graftwork.api.cli.chaos.faults import HOLD_S, PROCESS_FAULTS, Fault, stop_for_a_while
from tests.chaos.fleet import ServedFleet


async def _cut_connections(fleet: ServedFleet) -> None:
    """Ends every connection to the database, several times in a row."""
    for _ in range(6):
        await fleet.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.5)


async def _stall_database(fleet: ServedFleet) -> None:
    """Holds a lock on every table, so that nothing is read or written."""
    connection = await asyncpg.connect(fleet.database_url)
    try:
        tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        names = ", ".join(f'"{row["tablename"]}"' for row in tables)
        while True:  # the tables are locked one by one, so the server may wait for one while this waits for its own
            with contextlib.suppress(asyncpg.DeadlockDetectedError):
                async with connection.transaction():
                    await connection.execute(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
                    await asyncio.sleep(HOLD_S)
                return
    finally:
        await connection.close()


async def _make_read_only(fleet: ServedFleet) -> None:
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


async def _kill_redis(fleet: ServedFleet) -> None:
    """Kills Redis, which forgets everything."""
    fleet.redis.kill()
    await asyncio.sleep(2)
    fleet.redis.start()
    await fleet.redis_answers()


FAULTS: tuple[Fault[ServedFleet], ...] = (
    *PROCESS_FAULTS,
    Fault("all connections to the database are cut", _cut_connections),
    Fault("the database stalls", _stall_database),
    Fault("the database takes no writes", _make_read_only),
    Fault("Redis stalls", lambda fleet: stop_for_a_while(fleet.redis)),
    Fault("Redis is killed", _kill_redis),
)


def full_disk(folder: Path) -> Fault[ServedFleet]:
    """Returns the fault that the disk of `folder` has no room for a while."""

    async def strike(fleet: ServedFleet) -> None:
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        await asyncio.sleep(HOLD_S)
        filler.unlink()

    return Fault("the disk is full for a while", strike)
