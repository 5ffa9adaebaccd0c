"""Strikes a whole fleet with faults while agents stream the turns of their sessions, and checks what they were told.

Owns the run and its verdicts. A client goes on with each operation until it is answered, so every operation must end.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from graftwork.api.cli.bench.figures import percentile
from graftwork.api.cli.bench.page import Bars, Claim
from graftwork.api.cli.bench.report import Report
from graftwork.api.cli.chaos import verdicts
from graftwork.api.cli.chaos.agent_streams import StreamingAgent
from graftwork.api.cli.chaos.faults import STUCK_S, progress_after
from graftwork.api.cli.chaos.fleet_clients import ChatClient, Client
from graftwork.api.cli.chaos.fleet_faults import faults_of
from graftwork.api.cli.chaos.whole_fleet import FleetPlan, WholeFleet, whole_fleet

PAUSE_LIMIT_S = 3.0
"""The p99 of the pauses that streams may have when their engine is lost."""
_TENANTS = ("acme", "globex")
_CHATS = 2
"""Clients of each tenant that stream chats, beside the agents."""
_LOOK_EVERY_S = 0.5
_SEED = 20261122
_COLUMNS = ("fault", "times", "went on after s, worst", "streams moved", "their pause s, p50", "p99")

Show = Callable[[str, str], None]
"""Shows a line of progress: a phase, and its state."""


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault, the seconds from its end until every client had an answer, and what it did to streams."""

    fault: str
    recovery_s: float
    pauses_s: tuple[float, ...] = ()
    """The longest pause of each stream of an agent that has gone to another engine."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What a run had."""

    plan: FleetPlan
    agents: int
    struck: tuple[Struck, ...]
    chats: int
    turns: int
    """Completed turns of sessions."""
    failed_turns: int
    """Turns that failed with a typed error, and were sent again."""
    reconnects: int
    refused: int
    """Attempts that were answered with an error that a client may retry."""
    lost: tuple[str, ...]
    """Turns of which the server has something else than its client was told."""
    wrong_events: tuple[str, ...]
    wrong_bills: tuple[str, ...]
    untyped_ends: tuple[str, ...]
    not_run: tuple[str, ...] = ()
    """Faults that this machine could not have."""


async def run_chaos(folder: Path, plan: FleetPlan, agents: int, rounds: int, show: Show) -> Chaos:
    """Starts a fleet and strikes it with every fault in each round. Raises ServerFailed, or WrongAnswer for an answer
    that cannot be right.
    """
    luck = random.Random(_SEED)
    show("start", f"{plan.gateways} gateways and {plan.engines} engines")
    async with whole_fleet(folder, plan) as fleet, AsyncExitStack() as stack:
        clients = [one for name in _TENANTS for one in await _clients(fleet, name, agents, luck, stack)]
        struck: list[Struck] = []
        async with asyncio.TaskGroup() as group:
            is_over = asyncio.Event()
            for client in clients:
                group.create_task(client.run(is_over))
            await progress_after(clients, time.monotonic())
            faults = faults_of(fleet, luck)
            for number in range(rounds):
                for fault in luck.sample(faults, len(faults)):
                    await fleet.whole()
                    phase = f"round {number + 1}: {fault.name}"
                    show(phase, "strikes")
                    before = _moved(fleet)
                    await fault.strike(fleet)
                    show(phase, "is healed; some clients wait")
                    recovery_s = await progress_after(clients, time.monotonic())
                    pauses_s = _pauses(clients, _moved(fleet) - before)
                    struck.append(Struck(fault.name, recovery_s, tuple(pauses_s)))
                    show(phase, f"all went on after {recovery_s:.1f} s; {len(pauses_s)} streams moved")
            is_over.set()
        await _settle(fleet)
        return await _found(fleet, plan, clients, struck)


async def _clients(
    fleet: WholeFleet, name: str, agents: int, luck: random.Random, stack: AsyncExitStack
) -> list[Client]:
    """Returns the clients of a new tenant: its part of the agents, and two of chats."""
    mine = -(-agents // len(_TENANTS))
    headers = {"authorization": f"Bearer {await fleet.tenant(name, 2 * mine + 2 * _CHATS)}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=mine)
    http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, trust_env=False, limits=limits))
    kinds = [StreamingAgent] * mine + [ChatClient] * _CHATS
    return [kind(fleet, http, random.Random(luck.random())) for kind in kinds]


def _moved(fleet: WholeFleet) -> set[str]:
    """Returns the ids of all requests that gateways have moved so far, by their logs."""
    return {json.loads(line)["request_id"] for line in fleet.log_lines("request_moves")}


def _pauses(clients: Sequence[Client], moved: set[str]) -> list[float]:
    turns = (turn for client in clients if isinstance(client, StreamingAgent) for turn in client.turns)
    return sorted(turn.longest_pause_s for turn in turns if turn.turn_id in moved and len(turn.times) > 1)


async def _settle(fleet: WholeFleet) -> None:
    """Waits until no turn runs, and lets each gateway start once more, so that journals of dead ones are read."""
    running = "SELECT id FROM turns WHERE status = 'running'"
    for _ in range(int(STUCK_S / _LOOK_EVERY_S)):
        if not await fleet.stores.query(running):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    for gateway in fleet.gateways:
        gateway.kill()
        gateway.start()
    await fleet.ready()


async def _found(fleet: WholeFleet, plan: FleetPlan, clients: Sequence[Client], struck: Sequence[Struck]) -> Chaos:
    agents = [client for client in clients if isinstance(client, StreamingAgent)]
    chats = [client for client in clients if isinstance(client, ChatClient)]
    bills = [
        *await verdicts.wrong_turn_bills(fleet.stores, agents),
        *await verdicts.wrong_chat_bills(fleet.stores, chats),
    ]
    return Chaos(
        plan=plan,
        agents=len(agents),
        struck=tuple(struck),
        chats=sum(len(client.told) for client in chats),
        turns=sum(len(agent.completed) for agent in agents),
        failed_turns=sum(len(agent.failed) for agent in agents),
        reconnects=sum(agent.num_reconnects for agent in agents),
        refused=sum(client.num_refused for client in clients),
        lost=tuple(await verdicts.lost_turns(fleet.stores, agents)),
        wrong_events=tuple(await verdicts.wrong_events(agents)),
        wrong_bills=tuple(bills),
        untyped_ends=tuple(verdicts.untyped_ends(fleet, agents, chats)),
        not_run=() if fleet.has_small_disk else ("the disk is full",),
    )


def claims(found: Chaos) -> list[Claim]:
    """Returns what a run must show."""
    worst = max((one.recovery_s for one in found.struck), default=None)
    pauses = sorted(pause for one in found.struck for pause in one.pauses_s)
    p99 = percentile(pauses, 0.99)
    return [
        Claim(
            f"every client goes on within {STUCK_S:.0f} s of a fault's end",
            worst is not None and worst <= STUCK_S,
            "no fault" if worst is None else f"{worst:.1f} s at worst",
        ),
        Claim(
            "no committed turn is lost, and each session has exactly the messages that its client was told",
            not found.lost,
            f"{len(found.lost)} wrong, of {found.turns} completed turns",
        ),
        Claim(
            "no event is missing or comes twice",
            not found.wrong_events,
            f"{len(found.wrong_events)} wrong, {found.reconnects} reconnects",
        ),
        Claim("no bill is missing, wrong or double", not found.wrong_bills, f"{len(found.wrong_bills)} wrong"),
        Claim(
            "every stream finishes or fails with a typed error",
            not found.untyped_ends,
            f"{len(found.untyped_ends)} did not, {found.failed_turns} turns failed with one",
        ),
        Claim(
            f"p99 of the pauses of streams whose engine is lost is at most {PAUSE_LIMIT_S:.0f} s",
            None if p99 is None else p99 <= PAUSE_LIMIT_S,
            "no stream moved" if p99 is None else f"{p99:.2f} s of {len(pauses)} streams",
        ),
    ]


def chaos_report(found: Chaos) -> Report:
    """Returns the report of a run."""
    names = list(dict.fromkeys(one.fault for one in found.struck))
    rows: list[Sequence[object]] = []
    worst: dict[str, float] = {}
    for name in names:
        own = [one for one in found.struck if one.fault == name]
        pauses = sorted(pause for one in own for pause in one.pauses_s)
        worst[name] = max(one.recovery_s for one in own)
        row = (name, len(own), round(worst[name], 1), len(pauses), percentile(pauses, 0.5), percentile(pauses, 0.99))
        rows.append(tuple(round(one, 2) if isinstance(one, float) else one for one in row))
    chart = Bars("Until every client went on", "s, worst", [(name, worst[name]) for name in names])
    note = (
        f"{found.plan.gateways} gateways, {found.plan.engines} engines, {found.agents} agents: {found.chats} chats, "
        f"{found.turns} completed turns, {found.refused} refusals that were retried."
    )
    return Report("Chaos", note, _COLUMNS, rows, [chart], asdict(found), claims(found))
