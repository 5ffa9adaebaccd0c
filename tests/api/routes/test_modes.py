"""Tests of the degraded modes on the routes: who sets them, and what they take away from answers."""

import pytest

from tests.api.in_process_gateway import Gateway, TestTenant, chat

OFF = {"max_output_tokens": None, "suspend_drafts": False, "refuse_flex": False}


async def test_the_operator_sets_and_reads_the_modes(gateway: Gateway) -> None:
    """Without a change all modes are off; a PUT replaces all of them, and a GET shows them with their time."""
    before = (await gateway.admin.get("/v1/admin/modes")).json()
    changed = await gateway.admin.put("/v1/admin/modes", json={"max_output_tokens": 5, "refuse_flex": True})
    after = (await gateway.admin.get("/v1/admin/modes")).json()

    assert before == {"object": "modes", **OFF, "changed_at": None}
    assert (
        after
        == changed.json()
        == {**before, "max_output_tokens": 5, "refuse_flex": True} | {"changed_at": after["changed_at"]}
    )


@pytest.mark.parametrize("body", [{"max_output_tokens": 0}, {"max_output_tokens": "many"}, {"flex": False}])
async def test_wrong_modes_are_refused(body: dict[str, object], gateway: Gateway) -> None:
    """A limit below 1, a wrong type and an unknown mode get a 422 and change nothing."""
    assert (await gateway.admin.put("/v1/admin/modes", json=body)).status_code == 422
    assert (await gateway.admin.get("/v1/admin/modes")).json()["changed_at"] is None


async def test_a_tenant_may_not_touch_the_modes(tenant: TestTenant) -> None:
    """A tenant's key neither reads nor sets the modes."""
    assert (await tenant.client.get("/v1/admin/modes")).status_code == 403
    assert (await tenant.client.put("/v1/admin/modes", json={})).status_code == 403


async def test_a_capped_answer_says_so(gateway: Gateway, tenant: TestTenant) -> None:
    """The cap lowers what chats and turns may generate, and only an answer with a lower cap has the header."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()
    turns = f"/v1/sessions/{session['id']}/turns"
    await gateway.admin.put("/v1/admin/modes", json={"max_output_tokens": 5})

    capped = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=50))
    free = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=4))
    turn = await tenant.client.post(turns, json={"input": "Hello"})
    response = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hello"})

    assert [request.sampling.max_tokens for request in gateway.engine.requests] == [5, 4, 5, 5]
    for answer in (capped, turn, response):
        assert answer.headers["x-graftwork-degraded"] == "max_output_tokens=5"
    assert "x-graftwork-degraded" not in free.headers


async def test_suspended_drafts_reach_the_engine_and_change_no_answer(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine is told for each request whether it may draft; the answer has no header, because it is the same."""
    await tenant.client.post("/v1/chat/completions", json=chat())
    await gateway.admin.put("/v1/admin/modes", json={"suspend_drafts": True})
    answer = await tenant.client.post("/v1/chat/completions", json=chat())

    assert [request.uses_lookups for request in gateway.engine.requests] == [True, False]
    assert "x-graftwork-degraded" not in answer.headers


async def test_flex_is_refused_and_costs_nothing(gateway: Gateway, tenant: TestTenant) -> None:
    """With `refuse_flex`, a flex request is a 503 that says when to retry and leaves no usage; others are served."""
    await gateway.admin.put("/v1/admin/modes", json={"refuse_flex": True})

    refused = await tenant.client.post("/v1/chat/completions", json=chat(service_tier="flex"))
    served = await tenant.client.post("/v1/chat/completions", json=chat())

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "tier_suspended")
    assert refused.headers["retry-after"] == "60"
    assert (served.status_code, served.json()["service_tier"]) == (200, "default")
    assert sum(row["requests"] for row in await tenant.usage()) == 1
