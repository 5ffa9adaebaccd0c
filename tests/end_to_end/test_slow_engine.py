"""Tests of a fleet one of whose engines lives and is slow: it is stopped and continued many times a second."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from graftwork.api.cli.chaos.fleet import ADMIN_KEY, Process
from graftwork.api.cli.chaos.whole_fleet import FleetPlan, WholeFleet, whole_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_STOPPED_S, _RUNS_S = 0.2, 0.02
"""An eleventh of the time is left to the engine, in stops that are too short for silence."""
_AT_ONCE = 8
_ROUNDS = 40


async def slow_down(engine: Process) -> None:
    """Lets an engine run for an eleventh of the time, until it is cancelled."""
    assert engine.process is not None
    try:
        while True:
            os.kill(engine.process.pid, signal.SIGSTOP)
            await asyncio.sleep(_STOPPED_S)
            os.kill(engine.process.pid, signal.SIGCONT)
            await asyncio.sleep(_RUNS_S)
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine.process.pid, signal.SIGCONT)


async def figures(fleet: WholeFleet, name: str) -> dict[str, float]:
    """A metric of each engine."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN_KEY}"}, trust_env=False) as admin:
        text = (await admin.get(f"{fleet.urls[0]}/metrics", timeout=30)).text
    prefix = f'graftwork_replica_{name}{{replica="'
    lines = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    return {line.split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def ask(http: httpx.AsyncClient, fleet: WholeFleet, number: int) -> int:
    body = {"model": "graftwork-demo", "prompt": f"{number} tales of the sea", "max_tokens": 48, "ignore_eos": True}
    answer = await http.post(f"{fleet.urls[0]}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def test_a_slow_engine_loses_traffic(tmp_path: Path) -> None:
    """An engine that works at an eleventh of its speed is called slow, then gets under a quarter of the requests, and
    every request is answered.
    """

    async def run() -> tuple[float, float]:
        plan = FleetPlan(engines=2, gateways=1, store="sqlite")
        async with whole_fleet(tmp_path, plan) as fleet, httpx.AsyncClient(trust_env=False) as http:
            http.headers["authorization"] = f"Bearer {await fleet.tenant('acme', 64)}"
            slow = asyncio.create_task(slow_down(fleet.engines[1]))
            slowness = 1.0
            for number in range(_ROUNDS):
                await asyncio.gather(*(ask(http, fleet, number * _AT_ONCE + one) for one in range(_AT_ONCE)))
                slowness = (await figures(fleet, "slowness"))["engine-1"]
                if slowness > 1.0:
                    break
            before = await figures(fleet, "requests_total")
            for number in range(_ROUNDS, _ROUNDS + 6):
                await asyncio.gather(*(ask(http, fleet, number * _AT_ONCE + one) for one in range(_AT_ONCE)))
            after = await figures(fleet, "requests_total")
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            sent = {name: after[name] - before[name] for name in after}
            return slowness, sent["engine-1"] / sum(sent.values())

    slowness, share = asyncio.run(run())

    assert slowness > 3.0
    assert share < 0.25
