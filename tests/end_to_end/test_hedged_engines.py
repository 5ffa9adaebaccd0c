"""Tests of a first token that two real engines are asked for, because the first one is a stopped process."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.cli.chaos.fleet import ADMIN_KEY
from graftwork.api.cli.chaos.whole_fleet import FleetPlan, WholeFleet, whole_fleet
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.fleet.hedging import HEDGED_SHARE
from graftwork.engine.rpc.client import GrpcEngineClient
from tests.end_to_end.test_fleet_leases import billed, body, chunks, tokens
from tests.end_to_end.test_slow_engine import figures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_TELL_LATENESS = 40
"""First tokens from which the gateway learns when one is late."""
_EARN_A_HEDGE = round(1 / HEDGED_SHARE) + 1
_ATTEMPTS = 5
_LOOKS = 400
_STORY = "The harbour master keeps a list of all ships, of their masts, their cargo and their crews. " * 4


def story() -> dict[str, Any]:
    """A request whose prompt is long enough that it goes back to the engine that has its pages."""
    return body(1) | {"prompt": _STORY, "service_tier": "priority"}


def short(number: int) -> dict[str, Any]:
    return body(number) | {"max_tokens": 2, "service_tier": "priority"}


@asynccontextmanager
async def opened_fleet(folder: Path) -> AsyncIterator[tuple[WholeFleet, httpx.AsyncClient, httpx.AsyncClient]]:
    """A fleet of two engines, a client of a tenant with the priority tier, and the operator's."""
    plan = FleetPlan(engines=2, gateways=1, store="sqlite")
    async with whole_fleet(folder, plan) as fleet, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        http.headers["authorization"] = f"Bearer {await fleet.tenant('acme', 32)}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=fleet.urls[0], headers=headers, trust_env=False) as admin:
            made = (await admin.get("/v1/admin/tenants?limit=100")).json()["data"]
            (tenant,) = [one for one in made if one["name"] == "acme"]
            path = f"/v1/admin/tenants/{tenant['id']}"
            (await admin.patch(path, json={"service_tier_ceiling": "priority"})).raise_for_status()
            yield fleet, http, admin


async def answer(fleet: WholeFleet, http: httpx.AsyncClient, asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk async for chunk in chunks(http, fleet.urls[0], asked)]


async def read_stats(fleet: WholeFleet, replica_id: str) -> EngineStats:
    """The figures of one engine, as it says them itself."""
    (address,) = [one["address"] for one in await fleet.replicas() if one["id"] == replica_id]
    client = GrpcEngineClient(address)
    try:
        return await client.stats()
    finally:
        await client.close()


async def home_of(fleet: WholeFleet, http: httpx.AsyncClient) -> tuple[str, list[dict[str, Any]]]:
    """Sends the story undisturbed. Returns the engine that has computed it, and the chunks."""
    before = await figures(fleet, "requests_total")
    found = await answer(fleet, http, story())
    after = await figures(fleet, "requests_total")
    (home,) = [name for name in after if after[name] > before[name]]
    return home, found


async def answer_while_stopped(
    fleet: WholeFleet, http: httpx.AsyncClient, home: str
) -> tuple[list[dict[str, Any]], EngineStats, EngineStats]:
    """Sends the story while its engine is stopped. Returns the chunks, and the engine's figures before and when it has
    nothing to do again.
    """
    before = await read_stats(fleet, home)
    (engine,) = [one for one in fleet.engines if one.name == home]
    engine.signal(signal.SIGSTOP)
    try:
        found = await answer(fleet, http, story())
    finally:
        engine.signal(signal.SIGCONT)
    await fleet.whole()
    for _ in range(_LOOKS):
        after = await read_stats(fleet, home)
        if not after.running_requests + after.waiting_requests:
            return found, before, after
    raise AssertionError(f"{home} still runs the request: {after}")


async def bill(admin: httpx.AsyncClient, requests: int) -> tuple[int, int, int]:
    """What the tenant has used in this tier: requests, prompt tokens and tokens. Waits until it has so many requests."""
    for _ in range(_LOOKS):
        rows = (await admin.get("/v1/admin/usage?group_by=tier")).json()["data"]
        found = [(one["requests"], one["prompt_tokens"], one["completion_tokens"]) for one in rows]
        used = [one for one, row in zip(found, rows, strict=True) if row["group"] == "priority"]
        if used and used[0][0] >= requests:
            return used[0]
    raise AssertionError(f"less than {requests} requests are billed: {rows}")


def test_a_late_first_token_comes_from_the_other_engine(tmp_path: Path) -> None:
    """The engine with a prompt's pages is stopped: another one is asked, the answer and its one bill are those of an
    undisturbed run, and the stopped engine, when it goes on, generates nothing for it and keeps no page in use.
    """

    async def run() -> None:
        async with opened_fleet(tmp_path) as (fleet, http, admin):
            num_sent = 0
            for number in range(_TELL_LATENESS):
                await answer(fleet, http, short(number))
                num_sent += 1
            for attempt in range(_ATTEMPTS):
                start = await bill(admin, num_sent)
                home, expected = await home_of(fleet, http)
                undisturbed = await bill(admin, num_sent + 1)
                hedges = await figures(fleet, "hedges_total")
                found, before, after = await answer_while_stopped(fleet, http, home)

                assert tokens(found) == tokens(expected)
                assert billed(found) == billed(expected)
                num_sent += 2
                hedged = await bill(admin, num_sent)
                assert [b - a for a, b in zip(undisturbed, hedged, strict=True)] == [
                    b - a for a, b in zip(start, undisturbed, strict=True)
                ]
                assert hedged[0] == num_sent
                assert after.generated_tokens - before.generated_tokens < billed(expected) // 2
                assert after.active_pages == before.active_pages == 0
                if sum((await figures(fleet, "hedges_total")).values()) > sum(hedges.values()):
                    return
                for number in range(_EARN_A_HEDGE):  # this machine was so busy that the silence was noticed first
                    await answer(fleet, http, short(1000 * attempt + number))
                    num_sent += 1
            raise AssertionError("no first token was asked for twice")

    asyncio.run(run())
