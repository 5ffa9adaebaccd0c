"""Tests that the ledger, the metrics and the engines' reports agree, whatever becomes of the requests."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from graftwork.platform.errors import Unavailable
from graftwork.platform.ledger.upkeep.engine_reports import EngineReports
from graftwork.platform.ledger.upkeep.rollups import UsageRollups
from tests.api.in_process_gateway import Gateway, TestTenant, chat, gateway_settings, open_gateway

CHECK = "/v1/admin/usage/check"
LOST = Unavailable("The engine is gone.", code="engine_unavailable")


@pytest.fixture
async def gateway(tmp_path: Path, tiny_model: Path, database_url: str) -> AsyncIterator[Gateway]:
    """A gateway on SQLite, then on PostgreSQL, whose engine reports memory and time too."""
    async with open_gateway(gateway_settings(tmp_path / "data", tiny_model, database_url)) as opened:
        opened.engine.cached_tokens, opened.engine.host_tokens = 5, 2
        opened.engine.kv_byte_seconds, opened.engine.engine_us, opened.engine.adapter_bytes = 1000, 30, 7
        yield opened


async def check(gateway: Gateway, **query: Any) -> dict[str, Any]:
    """The answer of a check of all that was reported so far."""
    gateway.clock.advance(1.0)
    reports = gateway.engine.reports
    assert isinstance(reports, EngineReports)
    await reports.flush()
    answer = await gateway.admin.get(CHECK, params={"from": 0, "settled_s": 0, **query})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def send_all_kinds(gateway: Gateway, tenant: TestTenant) -> None:
    """Sends requests that end in every way: whole, at a stop string, with several answers, lost, cancelled, in a session."""
    client = tenant.client
    path = "/v1/chat/completions"
    assert (await client.post(path, json=chat())).status_code == 200
    assert (await client.post(path, json=chat(stop=["Paris"]))).status_code == 200
    assert (await client.post(path, json=chat(n=3))).status_code == 200
    body = {"model": "tiny", "prompt": ["One", "Two"], "n": 2, "max_tokens": 3}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (await client.post("/v1/embeddings", json={"model": "tiny", "input": "One"})).status_code == 200
    session = (await client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    assert (await client.post(f"/v1/sessions/{session}/turns", json={"input": "One"})).status_code == 200
    gateway.engine.breaks_after, gateway.engine.breakage = 2, LOST
    assert (await client.post(path, json=chat(n=2))).status_code == 503
    failed = await client.post(f"/v1/sessions/{session}/turns", json={"input": "Two"})
    assert failed.json()["status"] == "failed", failed.text
    gateway.engine.breaks_after = None
    gateway.engine.refusal = LOST
    assert (await client.post(path, json=chat())).status_code == 503
    gateway.engine.refusal = None
    await leave(gateway, tenant, chat(stream=True))


async def leave(gateway: Gateway, tenant: TestTenant, body: dict[str, Any]) -> None:
    """Sends a request, and leaves after two tokens."""
    gateway.engine.holds_after = 2
    running = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=body))
    await gateway.engine.held.wait()
    running.cancel()
    await gateway.engine.cancelled_event.wait()
    await asyncio.gather(running, return_exceptions=True)
    await gateway.resources.inference.tasks.close()
    gateway.engine.holds_after = None


def verdicts(body: dict[str, Any]) -> dict[str, int]:
    return {one["verdict"]: one["requests"] for one in body["compared"]}


async def test_every_request_agrees_with_what_the_engine_reported(gateway: Gateway) -> None:
    """Requests that end in all ways differ by nothing, in no figure."""
    await send_all_kinds(gateway, await gateway.tenant())

    body = await check(gateway)

    assert (body["differences"], verdicts(body), body["sums"]) == (0, {"agrees": 9}, [])
    (agrees,) = body["compared"]
    for field in ("prompt_tokens", "completion_tokens"):
        assert agrees["billed"][field] + agrees["unbilled"][field] == agrees["reported"][field]
        assert min(agrees[kind][field] for kind in ("billed", "unbilled", "reported")) > 0


async def test_the_metrics_agree_with_the_ledger(gateway: Gateway) -> None:
    """The gateway's counters of requests and generated tokens are what the ledger bills or has of failed requests, and the
    one request that no engine began."""
    tenant = await gateway.tenant()
    await send_all_kinds(gateway, tenant)
    await gateway.store_usage()

    metrics = (await gateway.admin.get("/metrics")).text

    async with gateway.resources.server.database.read() as session:
        rows = await session.execute(
            text(
                "SELECT outcome, count(*), sum(completion_tokens), sum(unbilled_completion_tokens) FROM usage_events"
                " GROUP BY outcome"
            )
        )
        found = {outcome: (count, int(billed), int(unbilled)) for outcome, count, billed, unbilled in rows}
    counted = {
        outcome: int(float(value))
        for outcome, value in re.findall(r'graftwork_requests_total\{outcome="(\w+)"[^}]*\} (\S+)', metrics)
    }
    begun = {outcome: count for outcome, (count, _, _) in found.items()}
    assert counted == begun | {"server_error": begun["server_error"] + 1}
    (generated,) = re.findall(r"graftwork_generated_tokens_total\{[^}]*\} (\S+)", metrics)
    billed = sum(tokens for _, tokens, _ in found.values())
    assert float(generated) == billed + found["server_error"][2]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ("UPDATE usage_events SET completion_tokens = completion_tokens + 1", "more"),
        ("UPDATE usage_events SET prompt_tokens = prompt_tokens - 1", "less"),
        ("UPDATE usage_events SET engine_us = engine_us - 1", "less"),
        ("UPDATE usage_events SET cached_tokens = cached_tokens + 1", "more"),
        ("DELETE FROM usage_events", "unbilled"),
    ],
)
async def test_a_wrong_row_is_found(gateway: Gateway, change: str, verdict: str) -> None:
    """A row with one token more or less, or without a row, is a difference with the request's id."""
    tenant = await gateway.tenant()
    answer = await tenant.client.post("/v1/chat/completions", json=chat())
    assert (await check(gateway))["differences"] == 0
    async with gateway.resources.server.database.write() as session:
        await session.execute(text(change))

    body = await check(gateway)

    (compared,) = body["compared"]
    assert (body["differences"], compared["verdict"], compared["is_difference"]) == (1, verdict, True)
    assert compared["examples"] == [answer.headers["x-request-id"]]


@pytest.mark.parametrize(
    ("tokens", "verdict", "differences"), [(-1, "interrupted", 0), (0, "agrees", 0), (1, "more", 1)]
)
async def test_a_request_whose_gateway_died_is_billed_at_most_what_was_reported(
    gateway: Gateway, tokens: int, verdict: str, differences: int
) -> None:
    """Its journal may lack tokens that the engine has reported, or have all of them; more is a difference."""
    tenant = await gateway.tenant()
    await tenant.client.post("/v1/chat/completions", json=chat())
    await check(gateway)
    change = "UPDATE usage_events SET outcome = 'interrupted', completion_tokens = completion_tokens + :tokens"
    async with gateway.resources.server.database.write() as session:
        await session.execute(text(change), {"tokens": tokens})

    body = await check(gateway)

    assert (verdicts(body), body["differences"]) == ({verdict: 1}, differences)


async def test_a_bill_without_a_report_is_found(gateway: Gateway) -> None:
    """A row that no engine has reported is a difference."""
    tenant = await gateway.tenant()
    for _ in range(2):
        await tenant.client.post("/v1/chat/completions", json=chat())
    await check(gateway)
    async with gateway.resources.server.database.write() as session:
        await session.execute(text("DELETE FROM engine_reports WHERE id = (SELECT max(id) FROM engine_reports)"))

    assert verdicts(await check(gateway)) == {"agrees": 1, "unreported": 1}


async def test_sums_that_differ_are_found(gateway: Gateway) -> None:
    """A sum with one token more than its requests is a difference, with its field and both values."""
    tenant, database = await gateway.tenant(), gateway.resources.server.database
    await UsageRollups(database, gateway.clock).roll_up()  # so that reports read the sums
    await tenant.client.post("/v1/chat/completions", json=chat())
    await gateway.store_usage()
    async with database.write() as session:
        await session.execute(text("DELETE FROM usage_unrolled"))  # as if the roll-up had lost it

    gateway.clock.advance(3 * 86_400)
    body = await check(gateway)

    assert {one["field"] for one in body["sums"]} >= {"requests", "prompt_tokens", "completion_tokens"}
    assert body["differences"] == len(body["sums"])


async def test_a_request_that_still_runs_is_pending(gateway: Gateway) -> None:
    """A young report without a row is no difference yet."""
    tenant = await gateway.tenant()
    await tenant.client.post("/v1/chat/completions", json=chat())
    await gateway.store_usage()
    async with gateway.resources.server.database.write() as session:
        await session.execute(text("DELETE FROM usage_events"))

    assert verdicts(await check(gateway, settled_s=60)) == {"pending": 1}
    assert (await check(gateway, settled_s=60))["differences"] == 0


async def test_the_check_tells_of_what_is_not_in_the_ledger_yet(gateway: Gateway) -> None:
    """A request that runs has an entry in the journal, which is told; when it has ended there is none."""
    tenant = await gateway.tenant()
    gateway.engine.holds_after = 2
    running = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=chat()))
    await gateway.engine.held.wait()

    during = await check(gateway)
    gateway.engine.release.set()
    await running
    after = await check(gateway)

    assert (during["journal"], during["differences"]) == ({"open": 1, "waiting": 0}, 0)
    assert (after["journal"], verdicts(after)) == ({"open": 0, "waiting": 0}, {"agrees": 1})
