"""Tests of items of conversations, and of the count of a response's prompt, also through the `openai` package."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from graftwork.platform.quotas.quota import Quota
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant
from tests.api.routes.test_responses import CALL, TOOL, ask


@pytest.fixture
async def client(gateway: Gateway, tenant: TestTenant) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        yield client


def said(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


async def test_items_are_added_and_read(gateway: Gateway, client: AsyncOpenAI, tenant: TestTenant) -> None:
    """Added items have ids, are listed in order between the responses, and are in the next prompt."""
    conversation = await client.conversations.create()
    first = await client.conversations.items.create(conversation.id, items=[said("One"), said("Two", "assistant")])
    await client.responses.create(model="tiny", input="Three", conversation=conversation.id)

    added = await client.conversations.items.create(conversation.id, items=[said("Four")])
    await client.responses.create(model="tiny", input="Five", conversation=conversation.id)

    read = await client.conversations.items.retrieve(added.data[0].id or "", conversation_id=conversation.id)
    listed = [item async for item in await client.conversations.items.list(conversation.id, order="asc")]
    answer = gateway.engine.text
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr, index]
    assert texts == ["One", "Two", "Three", answer, "Four", "Five", answer]
    assert [item.id for item in listed[:2]] == [item.id for item in first.data]
    assert (read.to_dict(), listed[4].to_dict()) == (added.data[0].to_dict(),) * 2
    whole = [
        said("One"),
        said("Two", "assistant"),
        said("Three"),
        said(answer, "assistant"),
        said("Four"),
        said("Five"),
    ]
    await ask(tenant, input=whole)
    assert gateway.engine.requests[-1].prompt_token_ids == gateway.engine.requests[-2].prompt_token_ids


async def test_items_that_are_not_there(client: AsyncOpenAI, tenant: TestTenant) -> None:
    """An unknown item, and an item of another conversation, are not found."""
    one, other = [await client.conversations.create(items=[said("Hi")]) for _ in range(2)]
    (item,) = [item async for item in await client.conversations.items.list(other.id)]
    assert item.id is not None

    for item_id in ("msg_nobody", item.id, "msg_é"):
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve(item_id, conversation_id=one.id)


async def test_items_answer_the_calls_that_wait(gateway: Gateway, tenant: TestTenant) -> None:
    """While calls wait for their outputs, the added items must begin with these."""
    conversation = (await tenant.client.post("/v1/conversations", json={})).json()["id"]
    path = f"/v1/conversations/{conversation}/items"
    gateway.engine.text = CALL
    (call,) = (await ask(tenant, tools=[TOOL], conversation=conversation))["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}

    refused = await tenant.client.post(path, json={"items": [said("Hi")]})
    added = await tenant.client.post(path, json={"items": [output, said("Hi")]})
    gateway.engine.text = "Ok."
    after = await ask(tenant, tools=[TOOL], conversation=conversation)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
    assert [item["type"] for item in added.json()["data"]] == ["function_call_output", "message"]
    assert after["status"] == "completed"


async def test_no_items_while_a_response_runs(gateway: Gateway, tenant: TestTenant) -> None:
    """A conversation in which a response runs takes no items and loses none."""
    conversation = (await tenant.client.post("/v1/conversations", json={"items": [said("Hi")]})).json()["id"]
    path = f"/v1/conversations/{conversation}/items"
    (item,) = (await tenant.client.get(path)).json()["data"]
    gateway.engine.holds_after = 1
    await ask(tenant, conversation=conversation, background=True)
    await gateway.engine.held.wait()

    refused = await tenant.client.post(path, json={"items": [said("Hi")]})
    kept = await tenant.client.delete(f"{path}/{item['id']}")
    gateway.engine.release.set()

    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in (refused, kept)] == (
        [(409, "turn_running")] * 2
    )


async def test_items_are_deleted(gateway: Gateway, client: AsyncOpenAI, tenant: TestTenant) -> None:
    """A deleted item is in no later prompt and list of its conversation, and the answer is the conversation."""
    conversation = await client.conversations.create(items=[said("One"), said("Two", "assistant"), said("Three")])
    items = [item async for item in await client.conversations.items.list(conversation.id, order="asc")]
    three = items[2].id or ""

    answer = await client.conversations.items.delete(three, conversation_id=conversation.id)
    again = await client.conversations.items.delete(three, conversation_id=conversation.id)

    left = [item async for item in await client.conversations.items.list(conversation.id, order="asc")]
    assert (answer, again) == (conversation, conversation)
    assert [item.id for item in left] == [item.id for item in items[:2]]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(three, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.delete("item_nobody", conversation_id=conversation.id)
    await client.responses.create(model="tiny", input="Four", conversation=conversation.id)
    await ask(tenant, input=[said("One"), said("Two", "assistant"), said("Four")])
    assert gateway.engine.requests[-1].prompt_token_ids == gateway.engine.requests[-2].prompt_token_ids


async def test_a_conversation_is_emptied_item_by_item(client: AsyncOpenAI, tenant: TestTenant) -> None:
    """A client may delete every item of a list, also the second half of a call, and go on with an empty history."""
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    conversation = await client.conversations.create(items=[said("One"), call, output, said("Two")])  # type: ignore[list-item]

    async for item in await client.conversations.items.list(conversation.id, limit=1):
        await client.conversations.items.delete(item.id or "", conversation_id=conversation.id)

    assert [item async for item in await client.conversations.items.list(conversation.id)] == []
    alone, inside = [await ask(tenant, **where) for where in ({}, {"conversation": conversation.id})]
    assert inside["usage"]["input_tokens"] == alone["usage"]["input_tokens"]


async def test_the_count_is_the_prompt_s(gateway: Gateway, client: AsyncOpenAI, tenant: TestTenant) -> None:
    """The count equals the prompt tokens of the response itself: alone, after a response and in a conversation."""
    first = await ask(tenant)
    conversation = (await tenant.client.post("/v1/conversations", json={"items": [said("Hi")]})).json()["id"]
    for fields in (
        {},
        {"instructions": "Be brief.", "tools": [TOOL]},
        {"previous_response_id": first["id"]},
        {"conversation": conversation},
    ):
        body: dict[str, Any] = {"model": "tiny", "input": "How are you?", **fields}
        reached = len(gateway.engine.requests)

        counted = await client.responses.input_tokens.count(**body)

        assert len(gateway.engine.requests) == reached
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == (await ask(tenant, **body))["usage"]["input_tokens"]


async def test_a_wrong_method_says_what_to_send(tenant: TestTenant) -> None:
    """A method that a path does not take is a 405 that names those that it takes."""
    answer = await tenant.client.put("/v1/responses/resp_1")

    error = answer.json()["error"]
    assert answer.status_code == 405
    assert error["message"] == "/v1/responses/resp_1 does not take PUT: send DELETE or GET or HEAD."
    assert answer.headers["allow"] == "DELETE, GET, HEAD"


async def test_storing_items_counts_in_the_limit_of_requests(gateway: Gateway) -> None:
    """Requests that store items count as requests of the tenant; an empty conversation does not."""
    tenant = await gateway.tenant(quota=Quota(requests_per_minute=2))
    body = {"items": [said("Hi")]}

    made = [await tenant.client.post("/v1/conversations", json=given) for given in ({}, body)]
    path = f"/v1/conversations/{made[0].json()['id']}/items"
    added = await tenant.client.post(path, json=body)
    refused = [await tenant.client.post(each, json=body) for each in (path, "/v1/conversations")]
    gateway.clock.advance(61.0)
    later = await tenant.client.post(path, json=body)

    assert [answer.status_code for answer in (*made, added, later)] == [200] * 4
    assert [answer.status_code for answer in refused] == [429, 429]
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert len((await tenant.client.get(path)).json()["data"]) == 2


async def test_a_conversation_has_a_limit_of_items(tenant: TestTenant) -> None:
    """The items of a conversation are bounded in number; the request that would exceed the limit is a 413."""
    items = [said(str(number)) for number in range(4000)]
    conversation = (await tenant.client.post("/v1/conversations", json={"items": items})).json()["id"]
    path = f"/v1/conversations/{conversation}/items"

    statuses = [(await tenant.client.post(path, json={"items": items})).status_code for _ in range(2)]
    last = await tenant.client.post(path, json={"items": [said("The last")] * 2000})

    assert statuses == [200, 413]
    assert last.status_code == 200


async def test_a_conversation_has_a_limit_of_characters(tenant: TestTenant) -> None:
    """The JSON of a conversation's items is bounded by 16 MiB, which two requests of the largest size do not reach."""
    seven_mb = [said("x" * 1_000_000) for _ in range(7)]
    conversation = (await tenant.client.post("/v1/conversations", json={"items": seven_mb})).json()["id"]
    path = f"/v1/conversations/{conversation}/items"

    answers = [await tenant.client.post(path, json={"items": seven_mb}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 413]
    assert answers[1].json()["error"]["code"] == "conversation_too_long"
