"""Tests of a fleet under faults: nothing is lost, doubled, unbilled or stuck, and no failure is billed."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from graftwork.api.cli.chaos.faults import STUCK_S, Fault, progress_after
from graftwork.api.cli.chaos.fleet_clients import ChatClient, Client, SessionClient
from graftwork.api.cli.chaos.verdicts import lost_turns, wrong_chat_bills, wrong_turn_bills
from tests.chaos.faults import FAULTS, full_disk
from tests.chaos.fleet import ServedFleet, running_fleet, running_server, small_disk

pytestmark = pytest.mark.slow

ROUNDS = 2
_POLL_S = 0.1


@dataclass
class Report:
    """What a run had: how many requests, and the most seconds after each kind of fault until all clients went on."""

    counts: Counter[str] = field(default_factory=Counter)
    took: dict[str, float] = field(default_factory=dict)

    @property
    def worst_s(self) -> float:
        return max(self.took.values())

    def __str__(self) -> str:
        rows = sorted(self.took.items(), key=lambda row: -row[1])
        return "\n".join([str(dict(self.counts)), *(f"{seconds:6.1f} s  {name}" for name, seconds in rows)])


async def strike_all(
    fleet: ServedFleet, clients: list[Client], faults: Sequence[Fault[ServedFleet]]
) -> dict[str, float]:
    """Strikes the fleet with each fault in turn. Returns the seconds until all went on, by fault."""
    took: dict[str, float] = {}
    for fault in faults:
        await fault.strike(fleet)
        seconds = await progress_after(clients, time.monotonic())
        took[fault.name] = max(seconds, took.get(fault.name, 0.0))
    return took


async def run_clients(fleet: ServedFleet, faults: Sequence[Fault[ServedFleet]], rounds: int, report: Report) -> None:
    """Strikes the fleet while clients of two tenants talk to it, and then compares what they know with the database."""
    luck = random.Random(20261122)
    async with AsyncExitStack() as stack:
        clients: list[Client] = []
        for name in ("acme", "globex"):
            headers = {"authorization": f"Bearer {await fleet.tenant(name, 6)}"}
            https = await stack.enter_async_context(httpx.AsyncClient(headers=headers, trust_env=False))
            kinds = (ChatClient, ChatClient, SessionClient, SessionClient)
            clients += [kind(fleet, https, random.Random(luck.random())) for kind in kinds]
        async with asyncio.TaskGroup() as group:
            is_over = asyncio.Event()
            for client in clients:
                group.create_task(client.run(is_over))
            await progress_after(clients, time.monotonic())
            for _ in range(rounds):
                for name, seconds in (await strike_all(fleet, clients, luck.sample(faults, len(faults)))).items():
                    report.took[name] = max(seconds, report.took.get(name, 0.0))
            is_over.set()
        chats = [client for client in clients if isinstance(client, ChatClient)]
        sessions = [client for client in clients if isinstance(client, SessionClient)]
        report.counts["chats"] = sum(len(client.told) for client in chats)
        report.counts["turns"] = sum(len(client.completed) for client in sessions)
        report.counts["refusals"] = sum(client.num_refused for client in clients)
        report.counts["failed turns"] = sum(len(client.failed) for client in sessions)
        await settled(fleet)
        assert await wrong_chat_bills(fleet, chats) == []
        assert await wrong_turn_bills(fleet, sessions) == []
        assert await lost_turns(fleet, sessions) == []


@pytest.mark.postgres
@pytest.mark.timeout(1800)
def test_nothing_is_lost_doubled_unbilled_or_stuck(
    tmp_path: Path, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through twenty faults each client goes on within 35 seconds, and the database agrees with what clients were told."""
    report = Report()

    async def run() -> None:
        async with running_fleet(tmp_path, postgres_url) as fleet:
            await run_clients(fleet, FAULTS, ROUNDS, report)

    asyncio.run(run())

    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201
    assert report.worst_s <= STUCK_S, str(report)


@pytest.mark.timeout(1800)
def test_a_full_disk_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While the disk of a server is full it refuses work; then it goes on, and nothing is lost or billed in vain."""
    report = Report()

    async def run() -> None:
        async with running_server(tmp_path, disk) as server:
            await run_clients(server, [full_disk(disk)], 3, report)

    with small_disk(tmp_path / "disk") as disk:
        asyncio.run(run())

    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201
    assert report.counts["refusals"], "the disk was never full"
    assert report.worst_s <= STUCK_S, str(report)


async def settled(fleet: ServedFleet) -> None:
    """Waits until no turn runs, and lets each gateway start once more, so that journals of dead ones are read."""
    deadline = time.monotonic() + STUCK_S
    while await fleet.query("SELECT id FROM turns WHERE status = 'running'"):
        assert time.monotonic() < deadline, "turns still run"
        await asyncio.sleep(_POLL_S)
    for gateway in fleet.gateways:
        gateway.kill()
        gateway.start()
    await fleet.ready()
