"""Tests of the unmodified `openai` package against a gateway on a real port."""

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.quotas.quota import Quota
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object"}},
}


@pytest.fixture
async def url(gateway: Gateway) -> AsyncIterator[str]:
    """Where the gateway listens."""
    async with gateway_on_port(gateway) as url:
        yield url


@pytest.fixture
async def client(url: str, tenant: TestTenant) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        yield client


async def test_chat(gateway: Gateway, client: AsyncOpenAI) -> None:
    """An answer parses, with its usage and its request id."""
    answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])

    assert answer.choices[0].message.content == gateway.engine.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer._request_id or "").startswith("req_")


async def test_stream(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A stream parses chunk by chunk, and ends with usage."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}],
        stream=True,
        stream_options={"include_usage": True},
    )

    found = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices) == gateway.engine.text
    assert found[-1].usage is not None


async def test_tools(gateway: Gateway, client: AsyncOpenAI) -> None:
    """The SDK's own accumulator puts a streamed call together, and its result can be sent back."""
    gateway.engine.text = CALL
    async with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=[TOOL], parallel_tool_calls=False
    ) as stream:
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    gateway.engine.text = "Sunny."

    second = await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"},
        ],
        tools=[TOOL],
    )

    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert second.choices[0].message.content == "Sunny."


async def test_completions_and_models(client: AsyncOpenAI, tenant: TestTenant) -> None:
    """Completions and models parse, adapters among them."""
    await tenant.push_adapter()

    answer = await client.completions.create(model="pirate", prompt=[1, 2, 3], max_tokens=4, echo=True)
    models = [model.id async for model in await client.models.list()]

    assert answer.choices[0].finish_reason == "length"
    assert models == ["tiny", "pirate"]
    assert (await client.models.retrieve("pirate@1")).id == "pirate@1"


async def test_error_classes(gateway: Gateway, url: str, client: AsyncOpenAI) -> None:
    """Each of our statuses is the SDK's exception of that name, with the field to blame."""
    ask = client.chat.completions.create
    stranger = AsyncOpenAI(base_url=f"{url}/v1", api_key="gw_no_body", max_retries=0)
    operator = AsyncOpenAI(base_url=f"{url}/v1", api_key="gwa_operator_0123456789abcdef", max_retries=0)
    poor = await gateway.tenant("Poor", Quota(requests_per_minute=0))
    limited = AsyncOpenAI(base_url=f"{url}/v1", api_key=poor.key)

    with pytest.raises(openai.AuthenticationError):
        await stranger.models.list()
    with pytest.raises(openai.PermissionDeniedError):
        await operator.models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        await ask(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as bad:
        await ask(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=9)
    with pytest.raises(openai.RateLimitError) as spent:
        await limited.completions.create(model="tiny", prompt="x")
    gateway.engine.refusal = Unavailable("gone", retry_after_s=0.001)
    with pytest.raises(openai.InternalServerError) as absent:
        await ask(model="tiny", messages=[{"role": "user", "content": "x"}])
    for other in (stranger, operator, limited):
        await other.close()

    assert unknown.value.code == "model_not_found"
    assert bad.value.param == "temperature"
    assert spent.value.response.headers["x-should-retry"] == "false"
    assert absent.value.status_code == 503


async def test_retries(gateway: Gateway, client: AsyncOpenAI) -> None:
    """The SDK retries after the milliseconds that the refusal names, and gets its answer."""
    refusal = CapacityContended("The queue is full.", retry_after_s=0.002)
    describe = gateway.engine.generate
    gateway.engine.refusal = refusal

    def generate_after_two(request):  # type: ignore[no-untyped-def]
        if len(gateway.engine.requests) == 2:
            gateway.engine.refusal = None
        return describe(request)

    gateway.engine.generate = generate_after_two  # type: ignore[method-assign]

    answer = await client.completions.create(model="tiny", prompt="x", max_tokens=3)

    assert answer.choices[0].finish_reason == "length"
    assert len(gateway.engine.requests) == 3


async def test_failure_in_a_stream(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A stream that fails after its start raises in the SDK."""
    gateway.engine.breaks_after, gateway.engine.breakage = 2, Unavailable("The engine is gone.")
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)

    with pytest.raises(openai.APIError, match="The engine is gone"):
        async for _ in stream:
            pass


async def test_leaving_a_stream(gateway: Gateway, client: AsyncOpenAI, tenant: TestTenant) -> None:
    """Closing the SDK's stream cancels the engine's work, and the generated tokens are metered."""
    gateway.engine.holds_after = 2
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    await gateway.engine.held.wait()

    await stream.close()
    await asyncio.wait_for(gateway.engine.cancelled_event.wait(), 60)
    await gateway.resources.inference.tasks.close()

    assert len(gateway.engine.cancelled) == 1
    assert (await tenant.usage())[0]["completion_tokens"] == 2
