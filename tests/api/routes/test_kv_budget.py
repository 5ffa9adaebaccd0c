"""Tests of budgets of KV on the routes: which requests bring one to the engine, and which are refused."""

from typing import Any

from tests.api.in_process_gateway import Gateway, TestTenant, chat

BUDGET: dict[str, Any] = {"kv_budget": 4096}


async def test_the_budget_reaches_the_engine_from_every_route(gateway: Gateway, tenant: TestTenant) -> None:
    """From chats, completions, responses and sessions; a request that names none keeps all KV."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny", "sampling": BUDGET})).json()
    bodies = {
        "/v1/chat/completions": chat(**BUDGET),
        "/v1/completions": {"model": "tiny", "prompt": "Hello", **BUDGET},
        "/v1/responses": {"model": "tiny", "input": "Hello", **BUDGET},
        f"/v1/sessions/{session['id']}/turns": {"input": "Hello"},
    }

    for route, body in bodies.items():
        assert (await tenant.client.post(route, json=body)).status_code == 200, route
    await tenant.client.post("/v1/chat/completions", json=chat())

    assert [request.sampling.kv_budget for request in gateway.engine.requests] == [4096] * 4 + [None]


async def test_a_wrong_budget_is_refused_with_the_field(tenant: TestTenant) -> None:
    """One below the smallest, and one beside a rolling window, get a 400 that names the field, also in a session."""
    for wrong in ({"kv_budget": 63}, {"kv_budget": 64, "attention_window": 9}):
        answer = await tenant.client.post("/v1/chat/completions", json=chat() | wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "kv_budget"
        session = await tenant.client.post("/v1/sessions", json={"model": "tiny", "sampling": wrong})
        assert session.status_code == 422
        assert "kv_budget" in session.json()["error"]["message"]
