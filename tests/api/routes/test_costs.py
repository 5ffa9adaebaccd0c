"""Tests of prices and costs on the routes: who sets them, and that turns, sessions, the ledger and invoices agree."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from graftwork.engine.core.events import DraftReport
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InternalFailure
from tests.api.in_process_gateway import Gateway, TestTenant, chat, session_frames

RATES = {"input": "0.50", "input_host": "0.10", "input_device": "0.05", "output": "1.50", "kv_gb_hour": "0.03"}
MONTH = datetime.fromtimestamp(ManualClock().now(), UTC).strftime("%Y-%m")
"""The month of the gateway's clock."""


async def set_prices(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    answer = await gateway.admin.post("/v1/admin/prices", json={"currency": "USD", "rates": RATES, **fields})
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    return body


def total(costs: list[dict[str, str]]) -> Decimal:
    assert [one["currency"] for one in costs] in ([], ["USD"])
    return sum((Decimal(one["amount"]) for one in costs), Decimal(0))


async def test_every_sum_of_costs_is_the_same(gateway: Gateway, tenant: TestTenant) -> None:
    """Turns add up to their session's cost; sessions and chats to the ledger's, however grouped; and that is the invoice.

    The counts in the sums are those that the engine has reported.
    """
    prices = await set_prices(gateway)
    gateway.engine.cached_tokens, gateway.engine.host_tokens = 7, 3
    gateway.engine.kv_byte_seconds, gateway.engine.adapter_bytes = 123_456_789, 1000
    gateway.engine.engine_us, gateway.engine.drafts = 1500, DraftReport(9, 5, 2)
    turns: dict[str, list[dict[str, Any]]] = {}
    for _ in range(2):
        session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
        for text in ("Hello", "Hello again"):
            answer = await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": text})
            turns.setdefault(session, []).append(answer.json()["usage"])
    await tenant.client.post("/v1/chat/completions", json=chat(n=2))

    sessions = {one["id"]: one["usage"] for one in (await tenant.client.get("/v1/sessions")).json()["data"]}
    by_group = {group: await tenant.usage(group) for group in ("day", "adapter", "session", "key", "tier", "price")}
    invoice = (await tenant.client.get(f"/v1/usage/invoice?month={MONTH}")).json()

    for session, usages in turns.items():
        read = (await tenant.client.get(f"/v1/sessions/{session}")).json()["usage"]
        assert read == sessions[session]
        assert read["requests"] == 2
        assert total(read["costs"]) == sum(Decimal(one["cost"]["amount"]) for one in usages)
        assert read["kv_byte_seconds"] == sum(one["kv_byte_seconds"] for one in usages)
        assert read["adapter_bytes"] == 2000
        tokens_each = [one["completion_tokens"] for one in usages]
        assert [one["kv_byte_seconds"] for one in usages] == [123_456_789 * (tokens + 1) for tokens in tokens_each]
    sums = {group: sum(total(row["costs"]) for row in rows) for group, rows in by_group.items()}
    assert len(set(sums.values())) == 1
    assert sums["day"] == total(invoice["totals"]) == sum(Decimal(line["amount"]) for line in invoice["lines"])
    assert {row["group"] for row in by_group["session"]} == {*turns, None}
    assert [row["group"] for row in by_group["price"]] == [prices["id"]]
    assert invoice["requests"] == 5
    assert invoice["unpriced"]["requests"] == 0
    quantities = {line["item"]: line["quantity"] for line in invoice["lines"]}
    assert (quantities["input_device"], quantities["input_host"]) == (4 * 5, 3 * 5)
    num_tokens = by_group["day"][0]["completion_tokens"]
    for rows in by_group.values():
        assert sum(row["engine_ms"] for row in rows) == 1.5 * (num_tokens + 6)  # five requests have six answers
        assert [sum(row[name] for row in rows) for name in ("drafted_tokens", "forced_tokens")] == [9 * 6, 2 * 6]
    assert sum(one["engine_ms"] for one in turns[session]) == read["engine_ms"]
    assert quantities["kv_gb_hour"] == by_group["day"][0]["kv_byte_seconds"]


async def test_a_price_holds_for_requests_from_its_time_on(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn before the first price has none; later ones have the price in force, and keep it when a newer one begins."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path = f"/v1/sessions/{session}/turns"
    free = (await tenant.client.post(path, json={"input": "Hi"})).json()
    await set_prices(gateway)
    first = (await tenant.client.post(path, json={"input": "Hi"})).json()
    await set_prices(gateway, rates={"input": "0", "output": "0"})
    last = (await tenant.client.post(path, json={"input": "Hi"})).json()

    assert free["usage"]["cost"] is None
    assert Decimal(first["usage"]["cost"]["amount"]) > 0
    assert last["usage"]["cost"] == {"amount": "0", "currency": "USD"}
    (of_session,) = (await tenant.client.get(f"/v1/sessions/{session}")).json()["usage"]["costs"]
    assert of_session == first["usage"]["cost"]
    invoice = (await tenant.client.get(f"/v1/usage/invoice?month={MONTH}")).json()
    assert (invoice["requests"], invoice["unpriced"]["requests"]) == (3, 1)


async def test_the_last_event_of_a_turn_has_its_cost(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream's `turn.completed` says the same usage as the turn."""
    await set_prices(gateway)
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]

    streamed = await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "Hi", "stream": True})

    assert '"cost":{"amount":"' in session_frames(streamed.text)[-1]["data"].replace(" ", "")


async def test_a_tier_and_a_tenant_have_their_own_prices(gateway: Gateway, tenant: TestTenant) -> None:
    """The price list of a row is the nearest one: of the tenant, then of the tier; a tenant sees its own."""
    everybody = await set_prices(gateway)
    flex = await set_prices(gateway, service_tier="flex")
    mine = await set_prices(gateway, tenant_id=tenant.id, currency="EUR")
    other = await gateway.tenant("Other")
    for client in (tenant.client, other.client):
        for tier in ("flex", "default"):
            await client.post("/v1/chat/completions", json=chat(service_tier=tier))

    assert {row["group"] for row in await tenant.usage("price")} == {mine["id"]}
    assert {row["group"] for row in await other.usage("price")} == {everybody["id"], flex["id"]}
    assert {row["costs"][0]["currency"] for row in await tenant.usage("tier")} == {"EUR"}
    seen = (await other.client.get("/v1/prices")).json()["data"]
    assert {one["id"] for one in seen} == {everybody["id"], flex["id"]}
    by_day = (await gateway.admin.get("/v1/admin/usage?group_by=day&from=0")).json()["data"]
    assert [one["currency"] for one in by_day[0]["costs"]] == ["EUR", "USD"]


async def test_an_answer_that_failed_by_the_servers_fault_costs_nothing(gateway: Gateway, tenant: TestTenant) -> None:
    """Neither its tokens nor its memory is in the ledger."""
    await set_prices(gateway)
    gateway.engine.kv_byte_seconds = gateway.engine.adapter_bytes = 10**9
    gateway.engine.breaks_after, gateway.engine.breakage = 2, InternalFailure("broken")

    await tenant.client.post("/v1/chat/completions", json=chat())

    (row,) = await tenant.usage("day")
    assert (row["requests"], row["kv_byte_seconds"], row["adapter_bytes"]) == (1, 0, 0)
    assert total(row["costs"]) == 0


async def test_the_operator_gets_a_tenants_invoice(gateway: Gateway, tenant: TestTenant) -> None:
    """The admin's invoice of a tenant is the tenant's own; a tenant of no use has one without lines."""
    await set_prices(gateway)
    await tenant.client.post("/v1/chat/completions", json=chat())
    other = await gateway.tenant("Other")

    path = f"/v1/admin/usage/invoice?month={MONTH}&tenant_id="
    of_tenant, of_other = [(await gateway.admin.get(path + one.id)).json() for one in (tenant, other)]

    assert of_tenant == (await tenant.client.get(f"/v1/usage/invoice?month={MONTH}")).json()
    assert (of_other["lines"], of_other["totals"], of_other["requests"]) == ([], [], 0)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"rates": {"input": 0.5, "output": "1"}}, 422),
        ({"rates": {"input": "0.5"}}, 422),
        ({"rates": {"input": "0.5", "output": "1e3"}}, 422),
        ({"currency": "$"}, 422),
        ({"service_tier": "gold"}, 422),
        ({"valid_from": 1}, 422),
        ({"tenant_id": "ten_nobody"}, 404),
    ],
)
async def test_wrong_prices_are_refused(fields: dict[str, Any], status: int, gateway: Gateway) -> None:
    """A rate that is a number or missing, a wrong currency, tier or time, and an unknown tenant change nothing."""
    gateway.clock.advance(1000)
    answer = await gateway.admin.post("/v1/admin/prices", json={"currency": "USD", "rates": RATES, **fields})

    assert answer.status_code == status, answer.text
    assert (await gateway.admin.get("/v1/admin/prices")).json()["data"] == []


async def test_a_tenant_may_not_touch_prices(tenant: TestTenant) -> None:
    """A tenant's key neither sets prices nor reads those of others."""
    assert (await tenant.client.get("/v1/admin/prices")).status_code == 403
    assert (await tenant.client.post("/v1/admin/prices", json={})).status_code == 403
    assert (await tenant.client.get(f"/v1/admin/usage/invoice?month={MONTH}&tenant_id={tenant.id}")).status_code == 403
    assert (await tenant.client.get("/v1/usage/invoice?month=June")).status_code == 422
