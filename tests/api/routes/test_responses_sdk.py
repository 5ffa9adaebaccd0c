"""Tests of the Responses API through the unmodified `openai` package on a real port."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import FunctionToolParam, Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

from graftwork.platform.errors import Unavailable
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object"},
    "strict": False,
}
WHOLE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
"""Validates what the SDK itself only takes apart."""


@pytest.fixture
async def client(gateway: Gateway, tenant: TestTenant) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        yield client


async def ask(client: AsyncOpenAI, text: str = "Hello", **fields: Any) -> Response:
    response: Response = await client.responses.create(model="tiny", input=text, **fields)
    return response


async def ended(client: AsyncOpenAI, response_id: str) -> Response:
    """The response, fetched once its stream is over."""
    async for _ in await client.responses.retrieve(response_id, stream=True):
        pass
    return await client.responses.retrieve(response_id)


async def test_create_and_retrieve(gateway: Gateway, client: AsyncOpenAI) -> None:
    """An answer parses whole, with usage that adds up, and is the same when it is fetched again."""
    gateway.engine.cached_tokens = 3

    response = await ask(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    again = await client.responses.retrieve(response.id)

    Response.model_validate(response.to_dict())
    assert response.output_text == gateway.engine.text
    assert (response.status, response.instructions, response.metadata) == ("completed", "Be brief.", {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens == len(gateway.engine.requests[0].prompt_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert again.to_dict() == response.to_dict()


async def test_stream(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A stream's events come in OpenAI's order, numbered from 0 without a gap, each whole."""
    stream = await client.responses.create(model="tiny", input="Hello", stream=True)

    events = [event async for event in stream]

    for event in events:
        WHOLE_EVENT.validate_python(event.to_dict())
    names = [event.type for event in events]
    assert [name for name in names if name != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == gateway.engine.text
    assert events[-1].type == "response.completed"
    assert events[-1].response.to_dict() == (await client.responses.retrieve(events[-1].response.id)).to_dict()


async def test_the_accumulator(gateway: Gateway, client: AsyncOpenAI) -> None:
    """The SDK's accumulator gives the same text and calls as the finished response."""
    gateway.engine.text = f"Let me look.\n{CALL}\n{CALL}"

    async with client.responses.stream(model="tiny", input="Weather?", tools=[TOOL]) as stream:
        names = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert names.index("response.output_text.done") < names.index("response.function_call_arguments.done")
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output_text == "Let me look."


async def test_tools(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A call's output continues the response that made the call, and is refused if no call waits."""
    gateway.engine.text = CALL
    first = await ask(client, "Weather?", tools=[TOOL])
    call = first.output[0]
    assert isinstance(call, ResponseFunctionToolCall)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    gateway.engine.text = "Sunny."

    with pytest.raises(openai.BadRequestError) as missing:
        await ask(client, "And?", tools=[TOOL], previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        await ask(client, [output | {"call_id": "call_x"}], previous_response_id=first.id)  # type: ignore[arg-type]
    second = await ask(client, [output], tools=[TOOL], previous_response_id=first.id)  # type: ignore[arg-type]

    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert second.output_text == "Sunny."
    assert call.call_id in str(missing.value)
    assert (missing.value.param, unknown.value.param) == ("input", "input[0].call_id")
    history = gateway.engine.requests[0].prompt_token_ids
    assert gateway.engine.requests[-1].prompt_token_ids[: len(history)] == history


async def test_background(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A background response is answered at once, continues, and is polled to its end."""
    gateway.engine.holds_queue = True
    accepted = await ask(client, background=True)
    await gateway.engine.held.wait()
    waiting = await client.responses.retrieve(accepted.id)
    gateway.engine.release.set()

    done = await ended(client, accepted.id)

    assert (accepted.status, waiting.status) == ("queued", "queued")
    assert (done.status, done.output_text) == ("completed", gateway.engine.text)


async def test_background_stream_is_resumed(gateway: Gateway, client: AsyncOpenAI) -> None:
    """Leaving a background stream does not stop it, and the rest can be streamed from any number."""
    gateway.engine.holds_after = 2
    stream = await client.responses.create(model="tiny", input="Hello", background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    gateway.engine.release.set()
    assert seen[0].type == "response.created"
    response_id = seen[0].response.id

    resumed = await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    rest = [event async for event in resumed]
    whole = [event async for event in await client.responses.retrieve(response_id, stream=True)]

    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.to_dict() for event in [*seen, *rest]] == [event.to_dict() for event in whole]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert gateway.engine.cancelled == []


async def test_cancel(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A cancelled response has that status at once and later, and keeps its output."""
    gateway.engine.holds_after = 2
    running = await ask(client, background=True)
    await gateway.engine.held.wait()

    cancelled = await client.responses.cancel(running.id)
    again = await client.responses.cancel(running.id)
    events = [event async for event in await client.responses.retrieve(running.id, stream=True)]

    assert (cancelled.status, again.to_dict()) == ("cancelled", cancelled.to_dict())
    assert gateway.engine.text.startswith(cancelled.output_text)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.to_dict() == cancelled.to_dict()
    assert len(gateway.engine.cancelled) == 1


async def test_leaving_ends_what_is_not_in_the_background(gateway: Gateway, client: AsyncOpenAI) -> None:
    """Closing the connection cancels an ordinary response, and its output can be read."""
    gateway.engine.holds_after = 2
    stream = await client.responses.create(model="tiny", input="Hello", stream=True)
    first = await anext(aiter(stream))
    assert first.type == "response.created"
    await gateway.engine.held.wait()

    await stream.close()
    await asyncio.wait_for(gateway.engine.cancelled_event.wait(), 60)

    assert (await ended(client, first.response.id)).status == "cancelled"


async def test_cut_answer(client: AsyncOpenAI) -> None:
    """An answer that is cut at its limit is incomplete, and says why."""
    response = await ask(client, max_output_tokens=3)

    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


async def test_failure(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A response that fails after its start is a failed response, streamed or not, and can be fetched."""
    gateway.engine.breaks_after, gateway.engine.breakage = 2, Unavailable("The engine is gone.")

    events = [event async for event in await client.responses.create(model="tiny", input="Hello", stream=True)]
    response = await ask(client)

    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert (response.status, response.error) == ("failed", events[-1].response.error)
    assert events[-1].response.error.message == "The engine is gone."


async def test_refusals(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A refusal before the start raises the SDK's class, and stores no response."""
    gateway.engine.refusal = Unavailable("gone", retry_after_s=0.001)
    with pytest.raises(openai.InternalServerError):
        await ask(client)
    gateway.engine.refusal = None

    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="nobody", input="Hello")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_nobody")
    with pytest.raises(openai.BadRequestError) as previous:
        await ask(client, previous_response_id="resp_nobody")

    assert unknown.value.code == "model_not_found"
    assert (previous.value.code, previous.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_conversation(gateway: Gateway, client: AsyncOpenAI) -> None:
    """Responses in a conversation continue each other, and its items are listed newest first."""
    conversation = await client.conversations.create(metadata={"a": "b"})
    await ask(client, "One", conversation=conversation.id)
    second = await ask(client, "Two", conversation={"id": conversation.id})

    items = [item async for item in await client.conversations.items.list(conversation.id)]
    await client.conversations.delete(conversation.id)

    assert second.conversation is not None
    assert second.conversation.id == conversation.id
    said = [(item.role, item.content[0].text) for item in items if item.type == "message"]  # type: ignore[union-attr]
    answer = gateway.engine.text
    assert said == [("assistant", answer), ("user", "Two"), ("assistant", answer), ("user", "One")]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(conversation.id)
    assert (await client.responses.retrieve(second.id)).output_text == answer


async def test_input_items_and_delete(client: AsyncOpenAI, tenant: TestTenant) -> None:
    """A response's input is listed page by page, and a deleted response is not found."""
    asked: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    response = await client.responses.create(model="tiny", input=asked)

    newest = [item async for item in await client.responses.input_items.list(response.id, limit=1)]
    oldest = [item async for item in await client.responses.input_items.list(response.id, order="asc")]
    await client.responses.delete(response.id)

    assert [item.role for item in newest] == ["user", "developer"]  # type: ignore[union-attr]
    assert oldest == newest[::-1]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    assert (await tenant.client.get("/v1/sessions")).json()["data"] == []
