"""Tests of gateways and engines as separate processes that find each other by leases in one database."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.cli.chaos.fleet import ADMIN_KEY, Fleet
from graftwork.api.cli.chaos.whole_fleet import FleetPlan, WholeFleet, whole_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_TOKENS = 96
_LONG_TOKENS = 800
"""So many that the engine still works when it is found and killed."""
_LOOKS = 600


def body(number: int) -> dict[str, Any]:
    return {
        "model": "graftwork-demo",
        "prompt": f"Number {number}: tell me a story about the harbour",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": 11,
        "stream": True,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
    }


async def chunks(http: httpx.AsyncClient, url: str, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                yield chunk


def tokens(found: list[dict[str, Any]]) -> list[str]:
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return [token for choice in choices if choice.get("logprobs") for token in choice["logprobs"]["tokens"]]


def billed(found: list[dict[str, Any]]) -> int:
    (only,) = [chunk["usage"] for chunk in found if chunk.get("usage")]
    return int(only["completion_tokens"])


async def epochs(fleet: WholeFleet) -> dict[str, int]:
    return {one["id"]: one["epoch"] for one in await fleet.replicas()}


async def kill_the_busy_one(fleet: WholeFleet) -> str:
    """SIGKILL to an engine that has a running request, and a new start. Returns its id."""
    for _ in range(_LOOKS):
        busy = [one["id"] for one in await fleet.replicas() if one.get("running_requests")]
        if busy:
            (engine,) = [one for one in fleet.engines if one.name == busy[0]]
            engine.kill()
            engine.start()
            return engine.name
    raise AssertionError("no engine ever had a request")


async def check_a_kill(fleet: WholeFleet, http: httpx.AsyncClient) -> None:
    asked = body(1) | {"max_tokens": _LONG_TOKENS}
    expected = [chunk async for chunk in chunks(http, fleet.urls[0], asked)]
    before, found, killed = await epochs(fleet), list[dict[str, Any]](), ""
    async for chunk in chunks(http, fleet.urls[1], asked):
        found.append(chunk)
        if len(found) == 3:
            killed = await kill_the_busy_one(fleet)

    assert tokens(found) == tokens(expected)
    assert billed(found) == billed(expected) == _LONG_TOKENS
    await fleet.whole()
    after = await epochs(fleet)
    assert after[killed] == before[killed] + 1
    assert {name for name in after if after[name] != before[name]} == {killed}


async def check_a_drain(fleet: WholeFleet, http: httpx.AsyncClient) -> None:
    """The second gateway is told to drain an engine; the first one learns it from the lease."""

    async def ask(number: int) -> int:
        return len(tokens([chunk async for chunk in chunks(http, fleet.urls[number % 2], body(number))]))

    asked = [asyncio.create_task(ask(number)) for number in range(16)]
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = await http.post(f"{fleet.urls[1]}/v1/admin/replicas/engine-1/drain", headers=headers)
    only = await http.post(f"{fleet.urls[1]}/v1/admin/replicas/engine-0/drain", headers=headers)
    process = fleet.engines[1].process
    assert process is not None
    status = await asyncio.to_thread(process.wait, 90)

    assert (answer.status_code, answer.json()["status"]) == (200, "draining")
    assert only.status_code == 409
    assert await asyncio.gather(*asked) == [_TOKENS] * 16
    assert status == 0
    assert [await ask(number) for number in (100, 101)] == [_TOKENS] * 2


async def tenant_client(fleet: Fleet) -> httpx.AsyncClient:
    key = await fleet.tenant("acme", 32)
    return httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False)


def test_an_engine_is_killed_and_another_drained(tmp_path: Path) -> None:
    """A killed engine's stream goes on unchanged, and its next start has the next epoch; a drain fails no request, ends
    the process with status 0, and both gateways go on with the other engine.
    """

    async def run() -> None:
        plan = FleetPlan(engines=2, gateways=2, store="sqlite")
        async with whole_fleet(tmp_path, plan) as fleet, await tenant_client(fleet) as http:
            await check_a_kill(fleet, http)
            await check_a_drain(fleet, http)

    asyncio.run(run())
