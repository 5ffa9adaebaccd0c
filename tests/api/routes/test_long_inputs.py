"""Tests of long bodies and long texts over a fake engine: which process reads them, and how the quota counts them."""

import asyncio
import gc
import json
import os
from typing import Any

import pytest

from graftwork.api.http.request import LONG_JSON_BYTES, JsonRequest
from graftwork.platform.quotas.quota import Quota
from graftwork.sessions.text.encoding import LONG_CHARACTERS
from graftwork.sessions.text.messages import Message
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, chat
from tests.sessions.tokenizer_and_templates import prompt_encoder

LONG = "weather " * (LONG_CHARACTERS // 8 + 1)
MESSAGES = [{"role": "user", "content": LONG}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(LONG)),
    ("/v1/completions", {"model": "tiny", "prompt": LONG}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
    ("/v1/tokenize", {"model": "tiny", "prompt": LONG}),
    ("/v1/responses", {"model": "tiny", "input": LONG}),
]
QUOTA = Quota(requests_per_minute=0)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_long_text_is_refused_before_it_is_encoded(
    gateway: Gateway, tenant: TestTenant, path: str, body: dict[str, Any]
) -> None:
    """A text that cannot fit in the context is a 400 on every route, and only a worker process has seen it."""
    answer = await tenant.client.post(path, json=body)

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    if path.startswith("/v1/messages"):
        assert message.startswith("prompt is too long: ")
        assert message.endswith(f" tokens > {CONTEXT_TOKENS} maximum")
    else:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert message.startswith(f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, your ")
    assert os.getpid() not in gateway.resources.inference.encoding.workers.worker_pids
    assert gateway.engine.requests == []


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_the_quota_comes_before_the_encoding(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    """A tenant without a request left is refused before anything starts to encode its long text."""
    tenant = await gateway.tenant(quota=QUOTA)

    answer = await tenant.client.post(path, json=body)

    assert answer.status_code == 429
    assert gateway.resources.inference.encoding.workers.worker_pids == ()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", {"model": "tiny", "prompt": "Hi"}),
        ("/v1/detokenize", {"model": "tiny", "tokens": [1, 2]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_counting_tokens_counts_as_a_request(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    """Requests that only encode or decode are limited as all others are, and leave no place taken."""
    tenant = await gateway.tenant(quota=Quota(requests_per_minute=2, max_concurrent_requests=1))

    statuses = [(await tenant.client.post(path, json=body)).status_code for _ in range(3)]

    assert statuses == [200, 200, 429]


async def test_refused_long_chats_count_as_requests_and_served_ones_count_once(gateway: Gateway) -> None:
    """A refused prompt costs one request; a served one costs one too, not two."""
    refused = await gateway.tenant("Refused", Quota(requests_per_minute=1))
    served = await gateway.tenant("Served", Quota(requests_per_minute=2))
    short = chat("Hi", prediction={"type": "content", "content": "<|im_end|>" * (LONG_CHARACTERS // 10 + 1)})

    statuses = [(await refused.client.post("/v1/chat/completions", json=chat(LONG))).status_code for _ in range(2)]
    others = [(await served.client.post("/v1/chat/completions", json=chat("Hi"))).status_code for _ in range(3)]

    assert statuses == [400, 429]
    assert others == [200, 200, 429]
    assert (await served.client.post("/v1/chat/completions", json=short)).status_code == 429


async def test_a_long_body_is_parsed_in_another_process(gateway: Gateway, tenant: TestTenant) -> None:
    """A long body is served as a short one is; a body of millions of empty lists is a 400 that says why."""
    workers = gateway.resources.server.json.workers
    padded = chat("Hi", metadata={"note": "x" * 500})
    body = json.dumps(padded).encode()
    short = await tenant.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert workers.worker_pids == ()

    long = await tenant.client.post(
        "/v1/chat/completions", content=body + b" " * LONG_JSON_BYTES, headers={"content-type": "application/json"}
    )
    lists = b'{"model":"tiny","messages":[' + b"[]," * 1_000_000 + b"[]]}"
    flood = await tenant.client.post(
        "/v1/chat/completions", content=lists, headers={"content-type": "application/json"}
    )

    assert [answer.status_code for answer in (short, long, flood)] == [200, 200, 400]
    assert flood.json()["error"]["code"] == "invalid_json"
    assert "send fewer" in flood.json()["error"]["message"]
    assert workers.worker_pids != ()
    first, second = gateway.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_token_counts_may_exceed_the_context(tenant: TestTenant) -> None:
    """count_tokens tells the number of a prompt that is too long to answer, so that a client can shorten it."""
    content = "x" * (CONTEXT_TOKENS + 100)
    answer = await tenant.client.post(
        "/v1/messages/count_tokens", json={"model": "tiny", "messages": [{"role": "user", "content": content}]}
    )

    expected = len(prompt_encoder().encode_messages([Message("user", content)]))
    assert answer.json() == {"input_tokens": expected}
    assert expected > CONTEXT_TOKENS


async def test_a_refused_body_is_freed_at_once(tenant: TestTenant) -> None:
    """A refused request leaves no cycle of objects that keeps its body until the next collection."""
    bodies = [chat(LONG), chat(LONG, unknown=1), {"model": "tiny", "messages": [[]] * 60_000}]
    requests = [("/v1/chat/completions", body) for body in bodies]
    requests.append(("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}))
    requests.append(("/v1/tokenize", {"model": "tiny", "prompt": LONG}))
    gc.collect()
    gc.disable()
    try:
        statuses = [(await tenant.client.post(path, json=body)).status_code for path, body in requests]
        await asyncio.sleep(0)
        kept = [found for found in gc.get_objects() if type(found) is JsonRequest]
    finally:
        gc.enable()

    assert statuses == [400] * 5
    assert kept == []
