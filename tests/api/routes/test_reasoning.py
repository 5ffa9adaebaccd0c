"""Tests of reasoning in each API, by the clients' own packages: told from the answer, counted and limited."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from graftwork.adapters.inspection.inspector import AdapterInspector
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import (
    Gateway,
    TestTenant,
    chat,
    gateway_settings,
    open_gateway,
    session_frames,
    write_model_folder,
)
from tests.sessions.tokenizer_and_templates import THINKING, text_tokenizer, token_id

THOUGHT, SAID = "Let me look.", "It is sunny."
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}}
NUM_TOKENS = len(text_tokenizer().encode(f"\n{THOUGHT}\n", allow_special=False))
HELLO: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def gateway(tmp_path: Path, sqlite_template: Path, inspector: AdapterInspector) -> AsyncIterator[Gateway]:
    """A gateway whose model reasons."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    model = write_model_folder(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text(THINKING)
    async with open_gateway(gateway_settings(tmp_path, model), inspector) as gateway:
        gateway.engine.text = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
        yield gateway


async def test_openai_reads_the_reasoning_of_a_chat(gateway: Gateway, tenant: TestTenant) -> None:
    """`reasoning_content` has the reasoning, whole and streamed, and the usage counts its tokens."""
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO)
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        deltas = [chunk.choices[0].delta.to_dict() for chunk in [part async for part in stream] if chunk.choices]

    message: dict[str, Any] = whole.choices[0].message.to_dict()
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID)
    assert "".join(str(delta.get("reasoning_content") or "") for delta in deltas) == THOUGHT
    assert "".join(str(delta.get("content") or "") for delta in deltas) == SAID
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == NUM_TOKENS


async def test_openai_reads_the_reasoning_of_a_response(gateway: Gateway, tenant: TestTenant) -> None:
    """A response has a reasoning item before its message, the same when it is streamed or fetched again."""
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        whole = await client.responses.create(model="tiny", input="Hi")
        again = await client.responses.retrieve(whole.id)
        async with client.responses.stream(model="tiny", input="Hi") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()

    for response in (whole, again, streamed):
        reasoning, message = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert [part.text for part in reasoning.content] == [THOUGHT]
        assert (message.type, response.output_text) == ("message", SAID)
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == NUM_TOKENS
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHT


async def test_anthropic_reads_the_thinking_of_a_message(gateway: Gateway, tenant: TestTenant) -> None:
    """A message has a thinking block before its text, whole and streamed; a budget reaches the engine."""
    async with gateway_on_port(gateway) as url, AsyncAnthropic(base_url=url, api_key=tenant.key) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 1100, "thinking": thinking}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()

    for message in (whole, streamed):
        blocks = [block.to_dict() for block in message.content]
        assert blocks == [
            {"type": "thinking", "thinking": THOUGHT, "signature": ""},
            {"type": "text", "text": SAID},
        ]
    assert [request.reasoning.max_tokens for request in gateway.engine.requests if request.reasoning] == [1024] * 2


async def test_a_session_tells_the_reasoning(gateway: Gateway, tenant: TestTenant) -> None:
    """The events of a turn have the reasoning; its second turn goes on behind the exact tokens of the first."""
    created = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()
    turns = [
        await tenant.client.post(f"/v1/sessions/{created['id']}/turns", json={"input": text, "stream": True})
        for text in ("Hi", "And now?")
    ]

    first, second = gateway.engine.requests[-2:]
    generated = text_tokenizer().encode(gateway.engine.text, allow_special=True)
    for turn in turns:
        assert turn.status_code == 200, turn.text
        frames = [(frame["event"], frame["data"]) for frame in session_frames(turn.text)]
        assert [name for name, _ in frames][1] == "reasoning.delta"
    so_far = (*first.prompt_token_ids, *generated)
    assert second.prompt_token_ids[: len(so_far)] == so_far


async def test_a_budget_and_a_schema_reach_the_engine(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine gets the tags' tokens for a budget, and for a grammar, which then holds behind the reasoning."""
    gateway.engine.text = f"<think>{THOUGHT}</think>{{}}"
    limited = await tenant.client.post("/v1/chat/completions", json=chat(thinking_token_budget=7))
    formed = await tenant.client.post("/v1/chat/completions", json=chat(response_format=SCHEMA))
    free = await tenant.client.post("/v1/chat/completions", json=chat())

    assert [answer.status_code for answer in (limited, formed, free)] == [200, 200, 200]
    rules = [request.reasoning for request in gateway.engine.requests]
    assert rules[0] is not None
    assert (rules[0].open_token_id, rules[0].close_token_id) == (token_id("<think>"), token_id("</think>"))
    assert [None if rule is None else rule.max_tokens for rule in rules] == [7, None, None]
    assert (rules[1] is None, rules[2] is None) == (False, True)
    assert formed.json()["choices"][0]["message"]["content"] == "{}"


async def test_reasoning_is_turned_off(gateway: Gateway, tenant: TestTenant) -> None:
    """An effort of `none` is what the chat template calls `enable_thinking: false`, and so is Anthropic's `disabled`."""
    gateway.engine.text = SAID
    await tenant.client.post("/v1/chat/completions", json=chat("Hi", reasoning_effort="none"))
    await tenant.client.post("/v1/chat/completions", json=chat("Hi", chat_template_kwargs={"enable_thinking": False}))
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "thinking": {"type": "disabled"}}
    answer = await tenant.client.post("/v1/messages", json=body)

    first, second, third = (request.prompt_token_ids for request in gateway.engine.requests)
    assert first == second == third
    assert text_tokenizer().decode(first).endswith("<think>\n\n</think>\n\n")
    assert [block["type"] for block in answer.json()["content"]] == ["text"]


async def test_a_text_completion_is_not_split(gateway: Gateway, tenant: TestTenant) -> None:
    """A completion is all the text that the model writes."""
    answer = await tenant.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 99})

    assert answer.json()["choices"][0]["text"] == gateway.engine.text


@pytest.mark.parametrize("budget", [-1, "many", 1.5])
async def test_a_wrong_budget_is_refused(tenant: TestTenant, budget: object) -> None:
    """A budget is a whole number from 0."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(thinking_token_budget=budget))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
