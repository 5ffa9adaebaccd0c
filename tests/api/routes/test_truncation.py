"""Tests of `truncation: "auto"`: the oldest items leave the prompt until it fits, and the stored history stays whole."""

from typing import Any

from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant
from tests.api.routes.test_responses import ask

RULES = {"role": "developer", "content": "Be brief."}
OLD = {"role": "user", "content": "old " * 300}
SAID = {"role": "assistant", "content": "said " * 150}
NEW = {"role": "user", "content": "new " * 150}


async def refusal(tenant: TestTenant, **fields: Any) -> tuple[int, str]:
    answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hi", **fields})
    return answer.status_code, answer.json()["error"]["code"]


async def test_the_oldest_items_are_left_out(gateway: Gateway, tenant: TestTenant) -> None:
    """The prompt is the one of the kept items alone: the developer's message, and the newest messages."""
    history = [RULES, OLD, SAID, OLD, SAID, NEW]
    refused = await refusal(tenant, input=history)

    answer = await tenant.client.post(
        "/v1/responses", json={"model": "tiny", "input": history, "truncation": "auto", "max_output_tokens": 8}
    )

    body, shortened = answer.json(), gateway.engine.requests[-1].prompt_token_ids
    assert refused == (400, "context_length_exceeded")
    assert (answer.status_code, body["truncation"]) == (200, "auto")
    assert answer.headers["x-graftwork-ignored"] == "truncation (dropped 4 items)"
    await ask(tenant, input=[RULES, NEW])
    assert gateway.engine.requests[-1].prompt_token_ids == shortened
    items = (await tenant.client.get(f"/v1/responses/{body['id']}/input_items")).json()["data"]
    assert len(items) == len(history)


async def test_the_stored_history_stays_whole(gateway: Gateway, tenant: TestTenant) -> None:
    """The next turn of a chain and of a conversation has the whole history again: too long without `auto`."""
    conversation = (await tenant.client.post("/v1/conversations", json={})).json()["id"]
    for first in ({}, {"conversation": conversation}):
        begun = await ask(tenant, input=[OLD, SAID, OLD, SAID, NEW], truncation="auto", **first)
        then = first or {"previous_response_id": begun["id"]}

        refused = await refusal(tenant, **then)
        again = await ask(tenant, input="Go on", truncation="auto", **then)

        assert refused == (400, "context_length_exceeded")
        shortened = gateway.engine.requests[-1].prompt_token_ids
        kept = [NEW, {"role": "assistant", "content": gateway.engine.text}, {"role": "user", "content": "Go on"}]
        await ask(tenant, input=kept)
        assert again["usage"]["input_tokens"] == len(shortened)
        assert gateway.engine.requests[-1].prompt_token_ids == shortened
    items = (await tenant.client.get(f"/v1/conversations/{conversation}/items?limit=100")).json()["data"]
    assert len(items) == 8


async def test_a_call_stays_with_its_output(gateway: Gateway, tenant: TestTenant) -> None:
    """A call whose output would be cut off goes with the output."""
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "x " * 900}
    last = {"role": "assistant", "content": "Done."}

    await ask(tenant, input=[OLD, call, output, last], truncation="auto")
    shortened = gateway.engine.requests[-1].prompt_token_ids

    await ask(tenant, input=[last])
    assert gateway.engine.requests[-1].prompt_token_ids == shortened


async def test_what_fits_is_not_shortened(gateway: Gateway, tenant: TestTenant) -> None:
    """A prompt that fits is the same with `auto`, and one message that is too long alone is refused."""
    await ask(tenant, input=[OLD, NEW])
    await ask(tenant, input=[OLD, NEW], truncation="auto")

    assert gateway.engine.requests[0].prompt_token_ids == gateway.engine.requests[1].prompt_token_ids
    alone = {"role": "user", "content": "x " * CONTEXT_TOKENS}
    assert await refusal(tenant, input=[OLD, alone], truncation="auto") == (400, "context_length_exceeded")
