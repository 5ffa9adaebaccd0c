"""Defines the faults of a whole fleet: of its engines, gateways, connections, stores, disk and clocks.

Owns what each fault does. Each strikes, holds, and heals.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from graftwork.api.cli.chaos.faults import HOLD_S, Fault
from graftwork.api.cli.chaos.fleet import Process
from graftwork.api.cli.chaos.whole_fleet import WholeFleet

STOP_S = 20.0
"""How long a stopped process stays stopped."""
_JUMP_S = 3600.0
_PIECE = 1 << 16
_REMOTE_CUTS = 6

Strike = Callable[[WholeFleet], Awaitable[None]]


def faults_of(fleet: WholeFleet, luck: Random) -> list[Fault[WholeFleet]]:
    """Returns the faults that this fleet can have. `luck` chooses the process that is struck."""
    found = [
        Fault("an engine is killed", lambda one: _kill(luck.choice(one.engines))),
        Fault("a gateway is killed", lambda one: _kill(luck.choice(one.gateways))),
        Fault("an engine is stopped for 20 s", lambda one: _stop(luck.choice(one.engines))),
        Fault("a gateway is stopped for 20 s", lambda one: _stop(luck.choice(one.gateways))),
        Fault("the connections to an engine are cut", _cut_link),
        Fault("nothing gets through to an engine", _block_link),
        Fault("clocks jump forward", lambda one: _jump(one, _JUMP_S)),
        Fault("clocks jump back", lambda one: _jump(one, -_JUMP_S)),
    ]
    if fleet.has_small_disk:
        found.append(Fault("the disk is full", _fill_disk))
    if fleet.stores.postgres is not None:
        found += [
            Fault("PostgreSQL is restarted", _restart_postgres),
            Fault("PostgreSQL is killed", _kill_postgres),
            Fault("all connections to the database are cut", _cut_database),
        ]
    if fleet.stores.redis is not None:
        found += [
            Fault("Redis is restarted", _restart_redis),
            Fault("Redis is stopped for 20 s", _stop_redis),
        ]
    return found


async def _kill(process: Process) -> None:
    """SIGKILL, and a start at once."""
    process.kill()
    process.start()


async def _stop(process: Process) -> None:
    process.signal(signal.SIGSTOP)
    await asyncio.sleep(STOP_S)
    process.signal(signal.SIGCONT)


async def _cut_link(fleet: WholeFleet) -> None:
    for _ in range(_REMOTE_CUTS):
        fleet.link.cut()
        await asyncio.sleep(0.5)


async def _block_link(fleet: WholeFleet) -> None:
    fleet.link.block()
    await asyncio.sleep(STOP_S)
    fleet.link.unblock()


async def _jump(fleet: WholeFleet, seconds: float) -> None:
    """Moves the clocks of a gateway and an engine, and back."""
    for clock in fleet.clocks:
        clock.write_text(str(seconds))
    await asyncio.sleep(HOLD_S)
    for clock in fleet.clocks:
        clock.write_text("0")


async def _fill_disk(fleet: WholeFleet) -> None:
    filler = fleet.data / "filler"

    def fill() -> None:
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(_PIECE))

    for _ in range(int(HOLD_S)):
        await asyncio.to_thread(fill)  # again and again: others may have freed some bytes
        await asyncio.sleep(1.0)
    filler.unlink()


async def _restart_postgres(fleet: WholeFleet) -> None:
    postgres = fleet.stores.postgres
    assert postgres is not None
    assert postgres.process is not None
    postgres.signal(signal.SIGINT)  # a fast shutdown: it ends all connections
    await asyncio.to_thread(postgres.process.wait, 60)
    await fleet.stores.answer()


async def _kill_postgres(fleet: WholeFleet) -> None:
    assert fleet.stores.postgres is not None
    fleet.stores.postgres.kill()
    await fleet.stores.answer()


async def _cut_database(fleet: WholeFleet) -> None:
    for _ in range(_REMOTE_CUTS):
        await fleet.stores.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.5)


async def _restart_redis(fleet: WholeFleet) -> None:
    """Kills Redis, which forgets everything."""
    assert fleet.stores.redis is not None
    fleet.stores.redis.kill()
    await asyncio.sleep(2)
    await fleet.stores.answer()


async def _stop_redis(fleet: WholeFleet) -> None:
    assert fleet.stores.redis is not None
    await _stop(fleet.stores.redis)
