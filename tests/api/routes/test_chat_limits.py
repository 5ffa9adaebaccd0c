"""Tests of `POST /v1/chat/completions` over a fake engine: limits, metering, tiers and disconnects."""

import asyncio
import json
from typing import Any

import pytest

from graftwork.engine.core.requests import ServiceTier
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from tests.api.fake_engine import CONTEXT_TOKENS, MAX_ANSWERS
from tests.api.in_process_gateway import Gateway, TestTenant, chat


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


async def test_a_token_limit_beyond_the_context(gateway: Gateway, tenant: TestTenant) -> None:
    """`max_tokens` is cut to what the prompt leaves free, in the engine's request and in the quota alike."""
    for field in ("max_tokens", "max_completion_tokens"):
        answer = await tenant.client.post("/v1/chat/completions", json=chat() | {field: 10 * CONTEXT_TOKENS})

        sent = gateway.engine.requests[-1]
        assert answer.status_code == 200
        assert sent.sampling.max_tokens == CONTEXT_TOKENS - len(sent.prompt_token_ids)


async def test_the_quota_reserves_a_cut_token_limit(gateway: Gateway) -> None:
    """A tenant with tokens for one whole context may ask for more than the context: only what fits is reserved."""
    tenant = await gateway.tenant(quota=Quota(tokens_per_minute=CONTEXT_TOKENS))

    answer = await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=10 * CONTEXT_TOKENS))

    assert answer.status_code == 200


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
    await gateway.resources.account.tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(max_concurrent_requests=1))
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
