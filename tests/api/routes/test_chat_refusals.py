"""Tests of `POST /v1/chat/completions` over a fake engine: bad bodies, refusals and failures."""

import json
from typing import Any

from graftwork.platform.errors import CapacityContended, Unavailable
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, chat, data_lines


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
    ("prompt_logprobs", -1),
    ("best_of", 2),
    ("structured_outputs.whitespace_pattern", {"json": {}, "whitespace_pattern": " ?"}),
    ("guided_whitespace_pattern", " ?"),
    ("functions", [{"name": "f"}]),
]
INVALID: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", -1),
    ("attention_window", 0),
    ("attention_sinks", -1),
    ("attention_sinks", 4),
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
    """A prompt that does not fit is a 400 in OpenAI's words, with both numbers."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat("x " * CONTEXT_TOKENS))

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    start = f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, your messages resulted in "
    assert error["message"].startswith(start)
    assert error["message"].endswith(" tokens. Please reduce the length of the messages (context_length_exceeded).")
    assert error["prompt_tokens"] > CONTEXT_TOKENS


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
    """A failure during a stream is its last event, without [DONE]; it costs nothing."""
    gateway.engine.breaks_after, gateway.engine.breakage = 3, Unavailable("The engine is gone.", retry_after_s=1)

    answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=True))

    assert answer.status_code == 200
    lines = data_lines(answer.text)
    assert json.loads(lines[-1])["error"]["code"] == "no_capacity"
    assert "event: error" in answer.text
    assert "[DONE]" not in answer.text
    (usage,) = await tenant.usage()
    assert (usage["requests"], usage["total_tokens"]) == (1, 0)
