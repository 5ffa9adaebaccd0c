"""Kills and stops the processes of a demo fleet while clients talk to it, and checks what the clients were told.

Owns the run and its verdicts. A client sends each request again until it is answered, so every operation must end.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from graftwork.api.cli.bench.faults import PROCESS_FAULTS, STUCK_S, progress_after
from graftwork.api.cli.bench.fleet import Fleet, demo_fleet
from graftwork.api.cli.bench.fleet_clients import ChatClient, Client, SessionClient
from graftwork.api.cli.bench.page import Bars, Claim
from graftwork.api.cli.bench.report import Report

_TENANTS = ("acme", "globex")
_CONCURRENT = 6
_SEED = 20261122
_COLUMNS = ("fault", "times", "went on after s, worst")

Show = Callable[[str, str], None]
"""Shows a line of progress: a phase, and its state."""


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault, and the seconds from its end until every client had an answer."""

    fault: str
    recovery_s: float


@dataclass(frozen=True, slots=True)
class Chaos:
    """What a run had."""

    struck: tuple[Struck, ...]
    chats: int
    turns: int
    """Completed turns of sessions."""
    refused: int
    """Attempts that were answered with an error that a client may retry."""
    lost: tuple[str, ...]
    """Sessions of which the server has other messages than their clients were told."""


async def run_chaos(folder: Path, rounds: int, show: Show) -> Chaos:
    """Starts a fleet and strikes it with every fault in each round. Raises ServerFailed, or WrongAnswer for an answer
    that cannot be right.
    """
    luck = random.Random(_SEED)
    show("start", "two gateways and an engine")
    async with demo_fleet(folder) as fleet, AsyncExitStack() as stack:
        clients = [client for name in _TENANTS for client in await _clients(fleet, name, luck, stack)]
        struck: list[Struck] = []
        async with asyncio.TaskGroup() as group:
            is_over = asyncio.Event()
            for client in clients:
                group.create_task(client.run(is_over))
            await progress_after(clients, time.monotonic())
            for number in range(rounds):
                for fault in luck.sample(PROCESS_FAULTS, len(PROCESS_FAULTS)):
                    phase = f"round {number + 1}: {fault.name}"
                    show(phase, "strikes")
                    await fault.strike(fleet)
                    show(phase, "is healed; some clients wait")
                    struck.append(Struck(fault.name, await progress_after(clients, time.monotonic())))
                    show(phase, f"all clients went on after {struck[-1].recovery_s:.1f} s")
            is_over.set()
        sessions = [client for client in clients if isinstance(client, SessionClient)]
        return Chaos(
            struck=tuple(struck),
            chats=sum(len(client.told) for client in clients if isinstance(client, ChatClient)),
            turns=sum(len(client.completed) for client in sessions),
            refused=sum(client.num_refused for client in clients),
            lost=tuple([one for client in sessions for one in await _differing(client)]),
        )


async def _clients(fleet: Fleet, name: str, luck: random.Random, stack: AsyncExitStack) -> list[Client]:
    """Returns two clients of chats and two of sessions, of a new tenant."""
    headers = {"authorization": f"Bearer {await fleet.tenant(name, _CONCURRENT)}"}
    http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, trust_env=False))
    kinds = (ChatClient, ChatClient, SessionClient, SessionClient)
    return [kind(fleet, http, random.Random(luck.random())) for kind in kinds]


async def _differing(client: SessionClient) -> list[str]:
    return [session for session, said in client.said.items() if await client.stored(session) != said]


def claims(found: Chaos) -> list[Claim]:
    """Returns what a run must show."""
    worst = max((one.recovery_s for one in found.struck), default=None)
    held = worst is not None and worst <= STUCK_S
    return [
        Claim(
            f"every client goes on within {STUCK_S:.0f} s of a fault's end",
            held,
            "no fault" if worst is None else f"{worst:.1f} s at worst",
        ),
        Claim(
            "each session has exactly the messages that its client was told",
            not found.lost,
            f"{len(found.lost)} differ, of {found.turns} completed turns",
        ),
    ]


def chaos_report(found: Chaos) -> Report:
    """Returns the report of a run."""
    names = list(dict.fromkeys(one.fault for one in found.struck))
    times = {name: [one.recovery_s for one in found.struck if one.fault == name] for name in names}
    rows: Sequence[Sequence[object]] = [(name, len(times[name]), round(max(times[name]), 1)) for name in names]
    chart = Bars("Until every client went on", "s, worst", [(name, max(times[name])) for name in names])
    note = (
        f"A demo fleet: {found.chats} chats, {found.turns} completed turns, {found.refused} refusals that were retried."
    )
    body = {
        "struck": [{"fault": one.fault, "recovery_s": one.recovery_s} for one in found.struck],
        "chats": found.chats,
        "turns": found.turns,
        "refused": found.refused,
        "lost": found.lost,
    }
    return Report("Chaos", note, _COLUMNS, rows, [chart], body, claims(found))
