"""Tests of batches of requests to `/v1/responses`: each line is a turn, answered and billed once."""

from collections import Counter
from typing import Any

import pytest

from graftwork.platform.batches.claims import BatchClaims
from tests.api.batches.conftest import Batching, GatedEngine, create, get, lines_of, living_lease, until
from tests.api.batches.test_crashes import Relay
from tests.api.in_process_gateway import Gateway, TestTenant

URL = "/v1/responses"


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    full = {"model": "tiny", "input": "What is the weather?"} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": full}


async def outcome(tenant: TestTenant, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The ended batch, and its answers and refusals by custom id."""
    ended = await get(tenant, batch)
    output, errors = [
        {one["custom_id"]: one["response"] for one in await lines_of(tenant, ended[name])}
        for name in ("output_file_id", "error_file_id")
    ]
    return ended, output, errors


async def test_each_line_is_answered_as_by_the_route(batching: Batching, tenant: TestTenant) -> None:
    """The output has the route's response, but for ids, time and tier; a wrong body has the route's error."""
    wrong = {"temperature": 9}
    alone = (await tenant.client.post(URL, json=line("x")["body"])).json()
    refused = await tenant.client.post(URL, json=line("x", **wrong)["body"])
    batch = await create(tenant, [line("a"), line("wrong", **wrong), line("b", max_output_tokens=16)], URL)

    await batching.run()

    ended, output, errors = await outcome(tenant, batch)
    assert (ended["status"], ended["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    found, ids = output["a"]["body"], ("id", "created_at", "output", "service_tier")
    assert found | dict.fromkeys(ids) == alone | dict.fromkeys(ids)
    assert [one["content"] for one in found["output"]] == [one["content"] for one in alone["output"]]
    assert found["service_tier"] == "flex"
    assert (errors["wrong"]["status_code"], errors["wrong"]["body"]) == (400, refused.json())
    assert {request.tier.value for request in batching.gateway.engine.requests[1:]} == {"flex"}


async def test_stored_responses_can_be_read_and_continued(batching: Batching, tenant: TestTenant) -> None:
    """A response is stored unless `store` is false; a line goes on from an earlier one, several lines from the same."""
    first = (await tenant.client.post(URL, json={"model": "tiny", "input": "Call me Ann."})).json()
    lines = [line(one, previous_response_id=first["id"]) for one in ("a", "b")]
    batch = await create(tenant, [*lines, line("kept"), line("gone", store=False)], URL)

    await batching.run()

    _, output, errors = await outcome(tenant, batch)
    ids = {custom_id: answer["body"]["id"] for custom_id, answer in output.items()}
    read = {custom_id: await tenant.client.get(f"{URL}/{ids[custom_id]}") for custom_id in ids}
    next_one = await tenant.client.post(URL, json={"model": "tiny", "input": "x", "previous_response_id": ids["a"]})
    assert errors == {}
    assert {custom_id: answer.status_code for custom_id, answer in read.items()} == {
        "a": 200,
        "b": 200,
        "kept": 200,
        "gone": 404,
    }
    assert read["kept"].json() == output["kept"]["body"]
    assert next_one.status_code == 200
    shortest = min(answer["body"]["usage"]["input_tokens"] for answer in output.values())
    assert output["a"]["body"]["usage"]["input_tokens"] == output["b"]["body"]["usage"]["input_tokens"] > shortest
    assert output["gone"]["body"]["usage"]["input_tokens"] == shortest


@pytest.mark.parametrize("field", ["stream", "background", "conversation"])
async def test_what_a_batch_cannot_serve_is_refused(batching: Batching, tenant: TestTenant, field: str) -> None:
    """A line with a stream, in the background or in a conversation is an error line that names the field."""
    conversation = (await tenant.client.post("/v1/conversations", json={})).json()["id"]
    value = conversation if field == "conversation" else True
    batch = await create(tenant, [line("a", **{field: value})], URL)

    await batching.run()

    _, _, errors = await outcome(tenant, batch)
    assert (errors["a"]["status_code"], errors["a"]["body"]["error"]["param"]) == (400, field)
    assert batching.gateway.engine.requests == []


async def test_a_batch_costs_what_its_responses_cost(batching: Batching, tenant: TestTenant) -> None:
    """Each answered line has one usage record of the tier flex and of the batch, and the batch shows their sum."""
    batch = await create(tenant, [line("a"), line("wrong", temperature=9), line("b", store=False)], URL)

    await batching.run()

    (by_batch,), (by_tier,) = [await tenant.usage(group) for group in ("batch", "tier")]
    used = (await get(tenant, batch))["usage"]
    assert (by_batch["group"], by_tier["group"], by_batch["requests"]) == (batch["id"], "flex", 2)
    assert by_batch["prompt_tokens"] == used["input_tokens"] > 0
    assert by_batch["completion_tokens"] == used["output_tokens"] > 0
    assert all(request.request_id.startswith(f"{batch['id']}.") for request in batching.gateway.engine.requests)


async def test_a_stored_response_is_not_made_again(batching: Batching, tenant: TestTenant) -> None:
    """If a gateway has stored responses and loses the batch before it stores their lines, nothing is billed; the next
    gateway finds them, and bills them.
    """
    engine = engine_of(batching.gateway)
    engine.is_open = False
    relay = Relay(batching.gateway, tenant, engine)
    batch = await create(tenant, [line("b", store=False), line("a")], URL)
    await relay.start()
    await until(lambda: engine.num_waiting == 2)

    assert relay.lease is not None
    database = batching.gateway.resources.server.database
    await relay.lease.end(database)
    relay.lease = await living_lease(batching.gateway)
    claims = BatchClaims(database, batching.gateway.resources.batches.files, relay.lease, batching.gateway.clock)
    await claims.claim_some(1, ())  # a second gateway claims the batch, and dies before it does anything
    engine.open()
    await relay.runners[0].drained()
    before = await tenant.usage("batch")
    await relay.crash()
    await relay.end()

    ended, output, errors = await outcome(tenant, batch)
    (row,) = await tenant.usage("batch")
    assert before == []
    assert (row["requests"], row["completion_tokens"]) == (2, ended["usage"]["output_tokens"])
    assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert (len(output), errors, len(engine.requests)) == (2, {}, 2)
    assert (await tenant.client.get(f"{URL}/{output['a']['body']['id']}")).json() == output["a"]["body"]
    assert (await tenant.client.get(f"{URL}/{output['b']['body']['id']}")).status_code == 404


async def test_what_breaks_off_costs_nothing(batching: Batching, tenant: TestTenant) -> None:
    """Lines whose gateway stops in the middle of their answers are answered anew, and only the second time is billed."""
    engine = engine_of(batching.gateway)
    engine.holds_after = 1
    batch = await create(tenant, [line("a"), line("b")], URL)
    await batching.runner.tick()
    await until(lambda: len(engine.requests) == 2)
    await batching.runner.close()
    begun = [await tenant.usage("batch")]

    engine.holds_after = None
    batching.gateway.clock.advance(60)
    await until_ended(batching, tenant, batch)

    ended, output, _ = await outcome(tenant, batch)
    (row,) = await tenant.usage("batch")
    assert sum(one["total_tokens"] for rows in begun for one in rows) == 0
    assert (row["prompt_tokens"], row["completion_tokens"]) == (
        ended["usage"]["input_tokens"],
        ended["usage"]["output_tokens"],
    )
    assert sum(one["body"]["usage"]["total_tokens"] for one in output.values()) == row["total_tokens"] > 0
    assert Counter(output.keys()) == Counter("ab")


async def until_ended(batching: Batching, tenant: TestTenant, batch: dict[str, Any]) -> None:
    """Lets further runners go on with a batch, as the clock passes, until it has ended."""
    for _ in range(5):
        relay = Relay(batching.gateway, tenant, engine_of(batching.gateway))
        await relay.start()
        await relay.end()
        if (await get(tenant, batch))["status"] == "completed":
            return
    raise AssertionError("the batch does not end")


def engine_of(gateway: Gateway) -> GatedEngine:
    assert isinstance(gateway.engine, GatedEngine)
    return gateway.engine
