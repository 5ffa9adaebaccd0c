"""Tests of inputs that name stored items by their ids."""

import json
from typing import Any

from tests.api.in_process_gateway import Gateway, TestTenant, session_frames
from tests.api.routes.test_responses import CALL, TOOL, ask


def names(item_id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": item_id}


async def test_references_are_the_items_that_they_name(gateway: Gateway, tenant: TestTenant) -> None:
    """A history of references has the same prompt as the same history in full, over a message and a tool call."""
    asked = [{"role": "user", "content": "Hello"}]
    gateway.engine.text = f"Let me look. {CALL}"
    first = await ask(tenant, input=asked, tools=[TOOL])
    said, called = first["output"]
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "sunny"}
    gateway.engine.text = "Sunny."

    await ask(tenant, input=[*asked, names(said["id"]), names(called["id"]), output], tools=[TOOL])
    await ask(tenant, input=[*asked, said, called, output], tools=[TOOL])

    _, by_name, in_full = [request.prompt_token_ids for request in gateway.engine.requests]
    assert by_name == in_full


async def test_a_referenced_input_has_ids_of_its_own(tenant: TestTenant) -> None:
    """The same item can be named twice and by many responses, and can be listed as input of each."""
    first = await ask(tenant)
    (said,) = first["output"]

    second = await ask(tenant, input=[names(said["id"]), names(said["id"]), {"role": "user", "content": "And?"}])

    listed = (await tenant.client.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in listed[:2]] == [said["content"][0]["text"]] * 2
    assert len({said["id"], *(item["id"] for item in listed)}) == 4


async def test_text_after_a_call_is_named_by_its_streamed_id(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream may show two messages of one answer; naming both of them, or one, gives the answer's text once."""
    gateway.engine.text = f"Before. {CALL} After."
    body = {"model": "tiny", "input": "Hello", "tools": [TOOL], "stream": True}
    streamed = session_frames((await tenant.client.post("/v1/responses", json=body)).text)
    output = json.loads(streamed[-1]["data"])["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    answers = [{"type": "function_call_output", "call_id": output[1]["call_id"], "output": "sunny"}]
    gateway.engine.text = "Ok."

    for items in (output, output[:2]):
        await ask(tenant, input=[*(names(item["id"]) for item in items), *answers], tools=[TOOL])
    await ask(tenant, input=[names(output[2]["id"])], tools=[TOOL])
    await ask(tenant, input=[names(output[0]["id"])], tools=[TOOL])

    both, first, later, alone = [request.prompt_token_ids for request in gateway.engine.requests[1:]]
    assert both == first
    assert later == alone


async def test_items_that_are_not_there(gateway: Gateway, tenant: TestTenant) -> None:
    """An unknown id, another tenant's and one of an unstored response are not found, with the entry's name."""
    mine, unstored = await ask(tenant), await ask(tenant, store=False)
    other = await gateway.tenant("Other")
    reached = len(gateway.engine.requests)

    async with other.client:
        for who, item_id in (
            (tenant, "msg_nobody"),
            (tenant, unstored["output"][0]["id"]),
            (other, mine["output"][0]["id"]),
        ):
            entries = [{"role": "user", "content": "Hi"}, names(item_id)]
            for path, body in (
                ("responses", {"model": "tiny", "input": entries}),
                ("conversations", {"items": entries}),
            ):
                answer = await who.client.post(f"/v1/{path}", json=body)
                error: dict[str, Any] = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (404, "item_not_found")
                assert error["param"] == ("input[1].id" if path == "responses" else "items[1].id")

    assert len(gateway.engine.requests) == reached


async def test_references_copy_at_most_a_body(tenant: TestTenant) -> None:
    """A small request that names a long item many times would copy gigabytes: it is refused, and copies nothing."""
    long = {"items": [{"role": "user", "content": "x" * 1_000_000}]}
    made = (await tenant.client.post("/v1/conversations", json=long)).json()
    (item,) = (await tenant.client.get(f"/v1/conversations/{made['id']}/items")).json()["data"]

    for path, field in (("conversations", "items"), ("responses", "input"), ("responses/input_tokens", "input")):
        model = {} if field == "items" else {"model": "tiny"}
        answer = await tenant.client.post(f"/v1/{path}", json={**model, field: [names(item["id"])] * 9})
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, f"{field}[8]")

    several = await tenant.client.post("/v1/conversations", json={"items": [names(item["id"])] * 8})
    assert several.status_code == 200


async def test_a_conversation_may_begin_with_references(tenant: TestTenant) -> None:
    """A new conversation copies the items that it names."""
    (said,) = (await ask(tenant))["output"]

    made = (await tenant.client.post("/v1/conversations", json={"items": [names(said["id"])]})).json()

    (item,) = (await tenant.client.get(f"/v1/conversations/{made['id']}/items")).json()["data"]
    assert item == {**said, "id": item["id"]}
    assert item["id"] != said["id"]


async def test_calls_of_the_input_wait_for_no_second_output(gateway: Gateway, tenant: TestTenant) -> None:
    """A response whose input has answered calls, and which calls again, waits only for its own call's output."""
    gateway.engine.text = CALL
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "cold"}
    first = await ask(tenant, input=[{"role": "user", "content": "Hi"}, call, output], tools=[TOOL])
    (own,) = first["output"]
    answer = {"type": "function_call_output", "call_id": own["call_id"], "output": "warm"}

    second = await ask(tenant, input=[answer], tools=[TOOL], previous_response_id=first["id"])

    assert second["status"] == "completed"
