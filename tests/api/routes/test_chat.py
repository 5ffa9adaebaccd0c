"""Tests of `POST /v1/chat/completions` over a fake engine: answers, streams, calls and choices."""

import asyncio
import json
from typing import Any

from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


async def test_answer(gateway: Gateway, tenant: TestTenant) -> None:
    """An answer has OpenAI's shape, with usage whose parts add up."""
    gateway.engine.cached_tokens = 5

    answer = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=100))

    assert answer.status_code == 200
    body = answer.json()
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    message = {"role": "assistant", "content": gateway.engine.text, "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    usage = body["usage"]
    details = usage["prompt_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert details["cached_tokens"] == details["device_tokens"] == 5
    assert details["cached_tokens"] + details["recomputed_tokens"] == usage["prompt_tokens"]
    assert usage["completion_tokens_details"] == {"drafted_tokens": 0, "accepted_tokens": 0, "forced_tokens": 0}


async def test_stream(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream begins with the role, ends with the reason and [DONE], and has the text of the answer."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=True, max_tokens=100))

    found = chunks(answer.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == gateway.engine.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert len({chunk["id"] for chunk in found}) == 1
    assert all("usage" not in chunk for chunk in found)


async def test_stream_with_usage(tenant: TestTenant) -> None:
    """If requested, usage is in a last chunk without choices."""
    body = chat(stream=True, stream_options={"include_usage": True})

    found = chunks((await tenant.client.post("/v1/chat/completions", json=body)).text)

    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["total_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in found[:-1])


async def test_tool_call(gateway: Gateway, tenant: TestTenant) -> None:
    """A call is read from the text, and the finish reason says so."""
    gateway.engine.text = CALL

    body = (await tenant.client.post("/v1/chat/completions", json=chat(tools=[TOOL]))).json()

    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    call = choice["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


async def test_streamed_tool_call(gateway: Gateway, tenant: TestTenant) -> None:
    """A call's id, type and name are sent once; what follows are fragments of arguments under the same index."""
    gateway.engine.text = CALL

    found = chunks((await tenant.client.post("/v1/chat/completions", json=chat(tools=[TOOL], stream=True))).text)

    deltas = [call for chunk in found for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    first, *rest = deltas
    assert (first["index"], first["type"], first["function"]) == (
        0,
        "function",
        {"name": "get_weather", "arguments": ""},
    )
    assert first["id"]
    assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in rest)
    assert json.loads("".join(delta["function"]["arguments"] for delta in rest)) == {"city": "Paris"}
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_tool_choice_none(gateway: Gateway, tenant: TestTenant) -> None:
    """With tool_choice none the prompt has no tools, and a call in the output is text."""
    gateway.engine.text = CALL

    body = (await tenant.client.post("/v1/chat/completions", json=chat(tools=[TOOL], tool_choice="none"))).json()

    assert body["choices"][0]["message"]["content"] == CALL
    plain = (await tenant.client.post("/v1/chat/completions", json=chat())).json()
    assert body["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


async def test_choices(gateway: Gateway, tenant: TestTenant) -> None:
    """n choices share one prompt and have different random numbers; the prompt counts once."""
    body = (await tenant.client.post("/v1/chat/completions", json=chat(n=3, seed=7, max_tokens=4))).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    samplings = [request.sampling for request in gateway.engine.requests]
    assert [(sampling.seed, sampling.choice) for sampling in samplings] == [(7, 0), (7, 1), (7, 2)]
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(gateway.engine.requests[0].prompt_token_ids)


async def test_first_choice_computes_the_prompt(gateway: Gateway, tenant: TestTenant) -> None:
    """Further choices start after the first token, so that they find the prompt in the cache."""
    gateway.engine.holds_after = 0
    asking = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=chat(n=3, max_tokens=4)))
    await gateway.engine.held.wait()
    sent_before = len(gateway.engine.requests)

    gateway.engine.release.set()
    answer = await asking

    assert sent_before == 1
    assert len(answer.json()["choices"]) == 3


async def test_every_sampling_field_reaches_the_engine(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine gets the sampling that the request has."""
    counting: dict[str, Any] = {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    biased: dict[str, Any] = {"logit_bias": {"7": -100, "5": 1.5}, "stop_token_ids": [9]}

    await tenant.client.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2, **counting, **biased))

    sampling = gateway.engine.requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -0.5, 1.5)
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((5, 1.5), (7, -100.0)), (9,))
    assert sampling.logprobs == 2


async def test_streamed_choices(gateway: Gateway, tenant: TestTenant) -> None:
    """Chunks of several choices interleave, and each choice is whole."""
    found = chunks((await tenant.client.post("/v1/chat/completions", json=chat(n=2, stream=True))).text)

    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == gateway.engine.text
        assert mine[0]["delta"]["role"] == "assistant"
        assert mine[-1]["finish_reason"] == "stop"


async def test_stop_string(gateway: Gateway, tenant: TestTenant) -> None:
    """An answer ends before its stop string, and the engine is told to stop."""
    body = (await tenant.client.post("/v1/chat/completions", json=chat(stop=" is"))).json()

    assert body["choices"][0]["message"]["content"] == "The weather in Paris"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert len(gateway.engine.cancelled) == 1


async def test_sampling_reaches_the_engine(gateway: Gateway, tenant: TestTenant) -> None:
    """Every sampling field reaches the engine, and max_completion_tokens has priority over max_tokens."""
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -1, "min_tokens": 2}

    answer = await tenant.client.post(
        "/v1/chat/completions", json=chat(max_tokens=9, max_completion_tokens=5, ignore_eos=True, **fields)
    )

    assert answer.status_code == 200
    sampling = gateway.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens, sampling.ignore_eos) == (40, 0.1, 2, True)
    assert sampling.seed == (1 << 64) - 1
