"""Tests of batches in OpenAI's form: their lines, their files, their ends, and what they cost."""

import asyncio

from tests.api.batches.conftest import Batching, create, get, line, lines_of
from tests.api.in_process_gateway import TestTenant


async def test_each_line_is_answered_as_by_its_route(batching: Batching, tenant: TestTenant) -> None:
    """The output has the body that the route answers, but for its ids, its time and its tier; a wrong body is an error."""
    alone = (await tenant.client.post("/v1/chat/completions", json=line("x")["body"])).json()
    batch = await create(tenant, [line("a"), line("wrong", temperature=9), line("b", max_tokens=2)])

    await batching.run()

    ended = await get(tenant, batch)
    assert (ended["status"], ended["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    output = await lines_of(tenant, ended["output_file_id"])
    errors = await lines_of(tenant, ended["error_file_id"])
    assert [one["custom_id"] for one in output] == ["a", "b"]
    same = {"choices": alone["choices"], "model": "tiny", "object": "chat.completion", "service_tier": "flex"}
    assert {name: output[0]["response"]["body"][name] for name in same} == same
    assert output[1]["response"]["body"]["usage"]["completion_tokens"] == 2
    refused = await tenant.client.post("/v1/chat/completions", json=line("x", temperature=9)["body"])
    assert [one["response"]["body"] for one in errors] == [refused.json()]
    assert errors[0]["response"]["status_code"] == refused.status_code == 400


async def test_a_batch_costs_what_its_lines_cost(batching: Batching, tenant: TestTenant) -> None:
    """Each answered line has one usage record of the tier flex, and the batch shows their sum."""
    batch = await create(tenant, [line("a"), line("wrong", temperature=9), line("b")])

    await batching.run()

    (by_tier,) = await tenant.usage("tier")
    used = (await get(tenant, batch))["usage"]
    assert (by_tier["group"], by_tier["requests"]) == ("flex", 2)
    assert by_tier["prompt_tokens"] == used["input_tokens"] > 0
    assert by_tier["completion_tokens"] == used["output_tokens"] > 0
    assert [request.tier.value for request in batching.gateway.engine.requests] == ["flex", "flex"]
    assert all(request.request_id.startswith(batch["id"]) for request in batching.gateway.engine.requests)
    await asyncio.sleep(0)
