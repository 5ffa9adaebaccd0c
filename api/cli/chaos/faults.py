"""Defines the faults of processes: each strikes a fleet, holds for some seconds, and heals.

Owns what a fault is, and how long clients take to go on after it.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from graftwork.api.cli.chaos.fleet import Fleet, Process
from graftwork.api.cli.chaos.fleet_clients import Client, WrongAnswer

HOLD_S = 8.0
"""How long a fault lasts that is not over at once: longer than `engine_silence_s`."""
STUCK_S = 35.0
"""After the end of a fault every client must go on within so many seconds."""
_POLL_S = 0.1


F_contra = TypeVar("F_contra", bound=Fleet, contravariant=True)


@dataclass(frozen=True)
class Fault(Generic[F_contra]):
    """One kind of fault of a kind of fleet. `strike` returns when it is healed."""

    name: str
    strike: Callable[[F_contra], Awaitable[None]]


async def _kill_engine(fleet: Fleet) -> None:
    fleet.engine.kill()
    fleet.engine.start()


def _kill_gateway(number: int) -> Callable[[Fleet], Awaitable[None]]:
    async def strike(fleet: Fleet) -> None:
        fleet.gateways[number].kill()
        fleet.gateways[number].start()

    return strike


async def stop_for_a_while(process: Process) -> None:
    """Stops a process by SIGSTOP for `HOLD_S` seconds, and lets it go on."""
    process.signal(signal.SIGSTOP)
    await asyncio.sleep(HOLD_S)
    process.signal(signal.SIGCONT)


PROCESS_FAULTS: tuple[Fault[Fleet], ...] = (
    Fault("the engine is killed", _kill_engine),
    Fault("the first gateway is killed", _kill_gateway(0)),
    Fault("the second gateway is killed", _kill_gateway(1)),
    Fault("the engine is stopped for a while", lambda fleet: stop_for_a_while(fleet.engine)),
    Fault("a gateway is stopped for a while", lambda fleet: stop_for_a_while(fleet.gateways[1])),
)
"""The faults that need nothing but the processes of a fleet with two gateways."""


async def progress_after(clients: Sequence[Client], healed_at: float) -> float:
    """Returns the seconds from the end of a fault until every client has got an answer.

    Raises WrongAnswer if one gets none for four times `STUCK_S`.
    """
    while not all(client.done_at > healed_at for client in clients):
        if time.monotonic() - healed_at > 4 * STUCK_S:
            waiting = Counter(type(client).__name__ for client in clients if client.done_at <= healed_at)
            raise WrongAnswer(f"after {4 * STUCK_S:.0f} s no answer for {dict(waiting)}")
        await asyncio.sleep(_POLL_S)
    return max(client.done_at for client in clients) - healed_at
