"""Tests of the service tiers of turns and responses: what the engine gets, and what the answer says."""

from typing import Any

import pytest

from tests.api.in_process_gateway import Gateway, TestTenant, session_frames

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ASKED_AND_SERVED = [("flex", "flex"), ("priority", "priority"), ("auto", "default"), (None, "default")]


async def turns_path(tenant: TestTenant, **fields: Any) -> str:
    answer = await tenant.client.post("/v1/sessions", json={"model": "tiny", **fields})
    return f"/v1/sessions/{answer.json()['id']}"


@pytest.mark.parametrize(("asked", "served"), ASKED_AND_SERVED)
async def test_a_turn_runs_at_the_tier_that_it_asks_for(asked: str | None, served: str, gateway: Gateway) -> None:
    """The engine gets the tier of the turn, and the answer, its header and a stream's header name the tier."""
    tenant = await gateway.tenant(tier="priority")
    path = await turns_path(tenant)
    body = {"input": "Hello", "service_tier": asked}

    answer = await tenant.client.post(f"{path}/turns", json=body)
    streamed = await tenant.client.post(f"{path}/turns", json=body | {"stream": True})

    assert answer.json()["service_tier"] == served
    assert [one.headers["x-graftwork-service-tier"] for one in (answer, streamed)] == [served, served]
    assert session_frames(streamed.text)[-1]["event"] == "turn.completed"
    assert [request.tier for request in gateway.engine.requests] == [served, served]


async def test_tool_outputs_name_the_tier_of_the_turn_that_they_start(gateway: Gateway) -> None:
    """A tier holds for one turn: the turn after tool outputs has the tier of their request, or the default."""
    tenant = await gateway.tenant(tier="priority")
    path = await turns_path(tenant, tools=[TOOL])
    gateway.engine.text = CALL
    tiers = []

    turn = (await tenant.client.post(f"{path}/turns", json={"input": "Hi", "service_tier": "flex"})).json()
    for tier in ("priority", None):
        outputs = [{"call_id": call["call_id"], "output": "sunny"} for call in turn["tool_calls"]]
        turn = (
            await tenant.client.post(f"{path}/tool_outputs", json={"outputs": outputs, "service_tier": tier})
        ).json()
        tiers.append(turn["service_tier"])

    assert tiers == ["priority", "default"]
    assert [request.tier for request in gateway.engine.requests] == ["flex", "priority", "default"]


@pytest.mark.parametrize(("asked", "served"), ASKED_AND_SERVED)
async def test_a_response_runs_at_the_tier_that_it_asks_for(asked: str | None, served: str, gateway: Gateway) -> None:
    """The engine gets the tier of the response, and the answer names it."""
    tenant = await gateway.tenant(tier="priority")

    answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hi", "service_tier": asked})

    assert answer.json()["service_tier"] == served
    assert [request.tier for request in gateway.engine.requests] == [served]


async def test_no_turn_is_above_the_tenants_ceiling(gateway: Gateway, tenant: TestTenant) -> None:
    """A tenant whose ceiling is `default` is served there, whatever it asks for, and is told."""
    path = await turns_path(tenant)

    turn = await tenant.client.post(f"{path}/turns", json={"input": "Hello", "service_tier": "priority"})
    response = await tenant.client.post(
        "/v1/responses", json={"model": "tiny", "input": "Hi", "service_tier": "priority"}
    )

    assert (turn.json()["service_tier"], response.json()["service_tier"]) == ("default", "default")
    assert [request.tier for request in gateway.engine.requests] == ["default", "default"]


@pytest.mark.parametrize(("path", "body"), [("turns", {"input": "Hi"}), ("tool_outputs", {"outputs": [{}]})])
async def test_an_unknown_tier_is_refused(path: str, body: dict[str, Any], tenant: TestTenant) -> None:
    """A tier that does not exist is a 422 that names the field, and starts nothing."""
    session = await turns_path(tenant)

    answer = await tenant.client.post(f"{session}/{path}", json=body | {"service_tier": "gold"})

    assert answer.status_code == 422
    assert "service_tier" in answer.text
