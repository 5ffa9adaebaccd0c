"""Tests of the unmodified `anthropic` package against a gateway on a real port."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, ToolParam

from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.quotas.quota import Quota
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, TestTenant

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: ToolParam = {
    "name": "get_weather",
    "description": "The weather now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
HELLO: MessageParam = {"role": "user", "content": "Hi"}


@pytest.fixture
async def url(gateway: Gateway) -> AsyncIterator[str]:
    async with gateway_on_port(gateway) as url:
        yield url


@pytest.fixture
async def client(url: str, tenant: TestTenant) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key=tenant.key) as client:
        yield client


async def test_message(gateway: Gateway, client: AsyncAnthropic) -> None:
    """An answer parses, and counts the cached part of the prompt separately."""
    gateway.engine.cached_tokens = 5

    message = await client.messages.create(model="tiny", max_tokens=100, messages=[HELLO])

    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": gateway.engine.text}]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "end_turn")
    usage = message.usage
    prompt_tokens = len(gateway.engine.requests[0].prompt_token_ids)
    assert (usage.cache_read_input_tokens, usage.input_tokens) == (5, prompt_tokens - 5)
    assert (usage.cache_creation_input_tokens, usage.output_tokens > 0) == (0, True)
    assert (message._request_id or "").startswith("req_")


async def test_stream_helper(gateway: Gateway, client: AsyncAnthropic) -> None:
    """The SDK's stream helper yields the text, and its final message equals the answer without streaming."""
    gateway.engine.cached_tokens = 5
    whole = await client.messages.create(model="tiny", max_tokens=100, messages=[HELLO])

    async with client.messages.stream(model="tiny", max_tokens=100, messages=[HELLO]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()

    assert text == gateway.engine.text
    assert final.to_dict() | {"id": ""} == whole.to_dict() | {"id": ""}
    assert (stream.request_id or "").startswith("req_")


async def test_raw_stream(client: AsyncAnthropic) -> None:
    """The events come in the order that Anthropic gives them, and the last usage is the whole one."""
    stream = await client.messages.create(model="tiny", max_tokens=100, messages=[HELLO], stream=True)

    events = [event async for event in stream]

    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    delta = events[-2]
    assert delta.type == "message_delta"
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", len(kinds) - 5 + 1)


async def test_tools(gateway: Gateway, client: AsyncAnthropic) -> None:
    """A call comes as a block with its input read, and its result goes back as one."""
    gateway.engine.text = f"Let me see.\n{CALL}"
    question: MessageParam = {"role": "user", "content": "Weather?"}
    async with client.messages.stream(model="tiny", max_tokens=200, messages=[question], tools=[TOOL]) as stream:
        called = await stream.get_final_message()
    said, call = called.content
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 degrees"}]}
    gateway.engine.text = "Sunny."

    answered = await client.messages.create(
        model="tiny",
        max_tokens=200,
        tools=[TOOL],
        messages=[
            question,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ],
    )

    assert called.stop_reason == "tool_use"
    assert said.to_dict() == {"type": "text", "text": "Let me see."}
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert answered.content[0].to_dict()["text"] == "Sunny."
    prompt = gateway.resources.inference.tokenizer.decode(
        gateway.engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )
    assert prompt.index("Let me see.") < prompt.index('"city": "Paris"') < prompt.index("20 degrees")


async def test_tool_runner(gateway: Gateway, client: AsyncAnthropic) -> None:
    """The SDK's own loop runs a tool and ends with the answer that its result led to."""

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather now.

        Args:
            city: Where.
        """
        gateway.engine.text = f"Sunny in {city}."
        return "20 degrees"

    gateway.engine.text = CALL
    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=200, messages=[{"role": "user", "content": "Weather?"}], tools=[get_weather]
    )

    final = await runner.until_done()

    assert final.content[0].to_dict()["text"] == "Sunny in Paris."
    prompt = gateway.resources.inference.tokenizer.decode(gateway.engine.requests[-1].prompt_token_ids)
    assert prompt.index("Weather?") < prompt.index("20 degrees"), "the SDK sends the whole history, without a thread"


async def test_plain_client(gateway: Gateway, url: str, tenant: TestTenant) -> None:
    """The blocking client works as well, with the key as a bearer token."""
    gateway.engine.text = CALL

    def talk() -> tuple[str, set[str], int]:
        with Anthropic(base_url=url, auth_token=tenant.key, api_key=None) as client:
            with client.messages.stream(model="tiny", max_tokens=200, messages=[HELLO], tools=[TOOL]) as stream:
                kinds = {event.type for event in stream}
                final = stream.get_final_message()
            counted = client.messages.count_tokens(model="tiny", messages=[HELLO], tools=[TOOL])
            return str(final.stop_reason), {*kinds}, counted.input_tokens

    reason, kinds, input_tokens = await asyncio.to_thread(talk)

    assert (reason, "input_json" in kinds) == ("tool_use", True)
    assert input_tokens == len(gateway.engine.requests[0].prompt_token_ids)


async def test_stop_sequences_and_limits(gateway: Gateway, client: AsyncAnthropic) -> None:
    """An answer names the stop string or the limit that ended it."""
    gateway.engine.text = "One, two, three."

    found = await client.messages.create(
        model="tiny", max_tokens=100, messages=[HELLO], stop_sequences=["four", ", three"]
    )
    cut = await client.messages.create(model="tiny", max_tokens=2, messages=[HELLO], stop_sequences=["four"])

    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", ", three")
    assert found.content[0].to_dict()["text"] == "One, two"
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 2)


async def test_error_classes(gateway: Gateway, url: str, client: AsyncAnthropic) -> None:
    """Each of our statuses is the SDK's exception of that name, in Anthropic's form."""
    stranger = AsyncAnthropic(base_url=url, api_key="gw_no_body", max_retries=0)
    operator = AsyncAnthropic(base_url=url, api_key=ADMIN_KEY, max_retries=0)
    poor = await gateway.tenant("Poor", Quota(requests_per_minute=0))
    limited = AsyncAnthropic(base_url=url, api_key=poor.key)

    def ask(client: AsyncAnthropic, **fields: Any) -> Any:
        return client.messages.create(**{"model": "tiny", "max_tokens": 9, "messages": [HELLO], **fields})

    with pytest.raises(anthropic.AuthenticationError):
        await ask(stranger)
    with pytest.raises(anthropic.PermissionDeniedError):
        await ask(operator)
    with pytest.raises(anthropic.NotFoundError):
        await ask(client, model="nobody")
    with pytest.raises(anthropic.BadRequestError, match="temperature") as bad:
        await ask(client, extra_body={"temperature": 9})
    with pytest.raises(anthropic.RateLimitError) as spent:
        await ask(limited)
    gateway.engine.refusal = Unavailable("gone", retry_after_s=0.001)
    with pytest.raises(anthropic.InternalServerError) as absent:
        await ask(client)
    for other in (stranger, operator, limited):
        await other.close()

    body = bad.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert bad.value.response.headers["x-request-id"] == bad.value.request_id == body["request_id"]
    assert spent.value.response.headers["x-should-retry"] == "false"
    assert absent.value.status_code == 503


async def test_models(gateway: Gateway, client: AsyncAnthropic, tenant: TestTenant) -> None:
    """The SDK reads the list of models page by page, and one model by name, with the length of the context."""
    for name in ("pirate", "poet", "clerk"):
        await tenant.push_adapter(name)

    pages = [model async for model in client.models.list(limit=2)]
    whole = await client.models.list()
    before = await client.models.list(before_id="clerk", limit=1)
    adapter = await client.models.retrieve("poet@1")

    assert [model.id for model in pages] == [model.id for model in whole.data] == ["tiny", "pirate", "poet", "clerk"]
    assert (whole.has_more, whole.first_id, whole.last_id) == (False, "tiny", "clerk")
    assert ([model.id for model in before.data], before.has_more) == (["poet"], True)
    assert (adapter.id, adapter.type, adapter.display_name) == ("poet@1", "model", "poet@1")
    assert adapter.created_at.timestamp() == int(gateway.clock.now())
    assert (adapter.max_input_tokens, adapter.lifecycle) == (CONTEXT_TOKENS, "active")
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("nobody")


async def test_failure_in_a_stream(gateway: Gateway, client: AsyncAnthropic) -> None:
    """A stream that fails after its start raises in the SDK."""
    gateway.engine.breaks_after, gateway.engine.breakage = 2, Unavailable("The engine is gone.")
    stream = await client.messages.create(model="tiny", max_tokens=50, messages=[HELLO], stream=True)

    with pytest.raises(anthropic.APIStatusError, match="The engine is gone"):
        async for _ in stream:
            pass


async def test_retries(gateway: Gateway, client: AsyncAnthropic) -> None:
    """The SDK retries after the milliseconds that the refusal names, and gets its answer."""
    refusal = CapacityContended("The queue is full.", retry_after_s=0.002)
    generate = gateway.engine.generate
    gateway.engine.refusal = refusal

    def generate_after_two(request):  # type: ignore[no-untyped-def]
        if len(gateway.engine.requests) == 2:
            gateway.engine.refusal = None
        return generate(request)

    gateway.engine.generate = generate_after_two  # type: ignore[method-assign]

    message = await client.messages.create(model="tiny", max_tokens=3, messages=[HELLO])

    assert message.stop_reason == "max_tokens"
    assert len(gateway.engine.requests) == 3


async def test_leaving_a_stream(gateway: Gateway, client: AsyncAnthropic, tenant: TestTenant) -> None:
    """Closing the SDK's stream cancels the engine's work, and the generated tokens are metered."""
    gateway.engine.holds_after = 2
    stream = await client.messages.create(model="tiny", max_tokens=50, messages=[HELLO], stream=True)
    await gateway.engine.held.wait()

    await stream.close()
    await asyncio.wait_for(gateway.engine.cancelled_event.wait(), 60)
    await gateway.resources.inference.tasks.close()

    assert len(gateway.engine.cancelled) == 1
    assert (await tenant.usage())[0]["completion_tokens"] == 2
