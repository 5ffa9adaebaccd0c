"""`POST /v1/chat/completions`, over a fake engine with given answers."""

import asyncio
import json
from typing import Any

import pytest

from graftwork.engine.core.requests import ServiceTier
from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.quotas.quota import Quota
from tests.api.fakes import CONTEXT_TOKENS, MAX_ANSWERS
from tests.api.harness import Gateway, TestTenant, chat, chunks, data_lines

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


@pytest.mark.parametrize(
    ("ceiling", "asked", "served"),
    [
        ("default", "priority", "default"),
        ("default", "flex", "flex"),
        ("priority", "priority", "priority"),
        ("flex", None, "flex"),
        ("default", "auto", "default"),
    ],
)
async def test_service_tier(gateway: Gateway, ceiling: str, asked: str | None, served: str) -> None:
    """A tenant's ceiling caps the tier that it asks for, and the answer says which was served."""
    tenant = await gateway.tenant(tier=ceiling)

    body = (await tenant.client.post("/v1/chat/completions", json=chat(service_tier=asked))).json()

    assert body["service_tier"] == served
    assert gateway.engine.requests[0].tier is ServiceTier(served)


async def test_unknown_fields_are_ignored(tenant: TestTenant) -> None:
    """Unknown fields and neutral values are accepted."""
    fields: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
    }

    answer = await tenant.client.post("/v1/chat/completions", json=chat(nonsense={"x": 1}, **fields))

    assert answer.status_code == 200


UNSERVED: list[tuple[str, Any]] = [
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("prompt_logprobs", 0),
    ("best_of", 2),
    ("structured_outputs", {"regex": "a+"}),
    ("functions", [{"name": "f"}]),
    ("guided_json", {"type": "object"}),
]
INVALID: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", -1),
    ("top_k", 1.5),
    ("n", 0),
    ("n", True),
    ("max_tokens", 0),
    ("max_completion_tokens", -1),
    ("max_tokens", 3.5),
    ("seed", 1 << 70),
    ("stop", [""]),
    ("stop", 7),
    ("stop", ["x"] * 17),
    ("messages", []),
    ("messages", "hello"),
    ("messages[0].role", [{"role": "robot", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("stream_options.include_usage", {"include_usage": "yes"}),
    ("service_tier", "platinum"),
    ("tools[0].function.name", [{"type": "function", "function": {"name": "no spaces"}}]),
    ("tools[0].function.strict", [{"type": "function", "function": {"name": "f", "strict": "yes"}}]),
    ("min_tokens", -1),
    ("prediction.type", {"type": "guess", "content": "x"}),
    ("prediction.content", {"type": "content"}),
    ("logprobs", 3),
    ("top_logprobs", 3),
    ("top_logprobs", 21),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"5": "much"}),
    ("logit_bias", {"05": 1, "5": 2}),
    ("logit_bias", {"1000000": 1}),
    ("logit_bias", {str(token): 0 for token in range(1025)}),
    ("logit_bias", [5]),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("stop_token_ids", [1000000]),
    ("stop_token_ids", [1] * 129),
]


async def test_bad_values(gateway: Gateway, tenant: TestTenant) -> None:
    """A value that is wrong, or known but not served, is a 400 that names its field, and reaches no engine."""
    answers = {}
    for field, value in UNSERVED + INVALID:
        top = field.split("[")[0].split(".")[0]
        answer = await tenant.client.post("/v1/chat/completions", json=chat() | {top: value})
        error = answer.json().get("error", {})
        answers[(field, str(value))] = (answer.status_code, error.get("param"), field in error.get("message", ""))

    assert answers == {(field, str(value)): (400, field, True) for field, value in UNSERVED + INVALID}
    assert gateway.engine.requests == []


async def test_missing_model(tenant: TestTenant) -> None:
    """A body without a model is a 400 that names it."""
    answer = await tenant.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


async def test_unknown_model(tenant: TestTenant) -> None:
    """An unknown or malformed model is a 404 with OpenAI's code."""
    for model in ["nobody", "tiny@3", "a/b", "", "x" * 5000, "pirate@@prod", "../x", "é"]:
        answer = await tenant.client.post("/v1/chat/completions", json=chat() | {"model": model})

        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_context_limit(tenant: TestTenant) -> None:
    """A prompt, or a prompt with its answer, that does not fit is a 400 with both numbers."""
    too_long = await tenant.client.post("/v1/chat/completions", json=chat("x " * CONTEXT_TOKENS))
    too_much = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=CONTEXT_TOKENS))

    for answer in (too_long, too_much):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(CONTEXT_TOKENS) in error["message"]


async def test_engine_refusal_is_a_status(gateway: Gateway, tenant: TestTenant) -> None:
    """A refusal by the engine before its start is an HTTP status, streamed or not, and refunds the tokens."""
    gateway.engine.refusal = CapacityContended("The queue is full.", retry_after_s=1.5)

    for stream in (False, True):
        answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=stream))

        assert answer.status_code == 429
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")
        assert answer.json()["error"]["type"] == "overloaded_error"
    assert await tenant.usage() == []


async def test_failure_in_a_stream(gateway: Gateway, tenant: TestTenant) -> None:
    """A failure during a stream is its last event, without [DONE]; the generated tokens are metered."""
    gateway.engine.breaks_after, gateway.engine.breakage = 3, Unavailable("The engine is gone.", retry_after_s=1)

    answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=True))

    assert answer.status_code == 200
    lines = data_lines(answer.text)
    assert json.loads(lines[-1])["error"]["code"] == "no_capacity"
    assert "event: error" in answer.text
    assert "[DONE]" not in answer.text
    assert (await tenant.usage())[0]["completion_tokens"] == 3


async def test_rate_limit(gateway: Gateway) -> None:
    """A limit's headers are on answers and refusals; a refusal says when to come back and reaches no engine."""
    tenant = await gateway.tenant(quota=Quota(requests_per_minute=1))

    first = await tenant.client.post("/v1/chat/completions", json=chat())
    second = await tenant.client.post("/v1/chat/completions", json=chat())

    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert second.status_code == 429
    assert second.headers["retry-after"] == "60"
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert len(gateway.engine.requests) == 1


async def test_tokens_settle(gateway: Gateway) -> None:
    """A reservation counts the prompt and the limit, and unused tokens are given back."""
    tenant = await gateway.tenant(quota=Quota(tokens_per_minute=1000))

    await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=900))
    second = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=900))

    assert second.status_code == 200
    remaining = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 0 < remaining < 100


async def test_budget_spent(gateway: Gateway) -> None:
    """A spent monthly budget is a 429 that must not be retried."""
    tenant = await gateway.tenant(quota=Quota(monthly_tokens=10))

    answer = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=100))

    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "insufficient_quota"
    assert answer.headers["x-should-retry"] == "false"


async def test_usage_row(tenant: TestTenant) -> None:
    """One request with many choices is one usage row, stored before its answer."""
    usage = (await tenant.client.post("/v1/chat/completions", json=chat(n=2))).json()["usage"]

    row = (await tenant.usage())[0]

    assert row["requests"] == 1
    assert row["prompt_tokens"] == usage["prompt_tokens"]
    assert row["completion_tokens"] == usage["completion_tokens"]


@pytest.mark.parametrize("holds_queue", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect(gateway: Gateway, tenant: TestTenant, stream: bool, holds_queue: bool) -> None:
    """When a client leaves, the engine's work is cancelled, its tokens metered, and the slot freed."""
    engine = gateway.engine
    engine.holds_after, engine.holds_queue = 4, holds_queue
    await gateway.resources.account.tenancy.set_quota(tenant.id, Quota(max_concurrent_requests=1))
    asking = asyncio.create_task(post_and_leave(gateway, tenant, chat(stream=stream), engine.held))

    await asking
    await asyncio.wait_for(engine.cancelled_event.wait(), 60)
    await gateway.resources.inference.tasks.close()

    assert len(engine.cancelled) == 1
    rows = await tenant.usage()
    assert [row["completion_tokens"] for row in rows] == ([] if holds_queue else [4])
    engine.holds_after, engine.holds_queue = None, False
    assert (await tenant.client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_choices_count_as_running(gateway: Gateway) -> None:
    """A request with more choices than the tenant may run at a time is a 429 that says so, and generates nothing."""
    limited = await gateway.tenant(quota=Quota(max_concurrent_requests=3))

    served = await limited.client.post("/v1/chat/completions", json=chat(n=3))
    refused = await limited.client.post("/v1/chat/completions", json=chat(n=4))

    assert (served.status_code, refused.status_code) == (200, 429)
    assert refused.json()["error"]["limit"] == "max_concurrent_requests"
    assert refused.headers["x-should-retry"] == "false"
    assert len(gateway.engine.requests) == 3


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages"])
async def test_more_than_the_engine_takes_is_refused_before_any_work(
    gateway: Gateway, tenant: TestTenant, route: str
) -> None:
    """With as many answers in flight as a tenant may have, its next request is a 429 before its model is looked up."""
    engine = gateway.engine
    engine.holds_queue = True
    flood = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=chat(n=MAX_ANSWERS)))
    await engine.held.wait()
    body = {"prompt": "x"} if route == "completions" else {"messages": [{"role": "user", "content": "x"}]}

    refused = await tenant.client.post(f"/v1/{route}", json={"model": "no such model", "max_tokens": 5, **body})
    other = await (await gateway.tenant("Other")).client.post("/v1/chat/completions", json=chat(model="no such model"))

    assert (refused.status_code, other.status_code) == (429, 404)
    assert int(refused.headers["retry-after"]) >= 1
    engine.release.set()
    assert (await flood).status_code == 200
    assert (await tenant.client.post("/v1/chat/completions", json=chat(n=MAX_ANSWERS))).status_code == 200


async def test_more_answers_than_a_tenant_may_ever_have(tenant: TestTenant) -> None:
    """Prompts times choices beyond the engine's limit for one tenant is a 400 that tells the limit."""
    body = {"model": "tiny", "prompt": ["x", "y"], "n": MAX_ANSWERS}

    answer = await tenant.client.post("/v1/completions", json=body)

    assert answer.status_code == 400
    assert str(MAX_ANSWERS) in answer.json()["error"]["message"]


async def post_and_leave(gateway: Gateway, tenant: TestTenant, body: dict[str, Any], leave: asyncio.Event) -> None:
    """Send a request straight to the application, and hang up when `leave` is set."""
    raw = json.dumps(body).encode()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        return None

    headers = [(b"authorization", f"Bearer {tenant.key}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("gateway.test", 80),
    }
    await gateway.app(scope, receive, send)
