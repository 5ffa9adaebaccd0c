"""Tests of requests that outlive their time: every route that generates says 504 `deadline_exceeded`."""

import json
from typing import Any

import pytest

from graftwork.platform.errors import DeadlineExceeded
from tests.api.in_process_gateway import Gateway, TestTenant, chat, data_lines

LATE = DeadlineExceeded("The request took longer than 5 seconds.")
ASK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "tiny", "prompt": "Hello"},
    "/v1/messages": chat(max_tokens=50),
    "/v1/responses": {"model": "tiny", "input": "Hello"},
}


@pytest.mark.parametrize("path", ASK)
async def test_a_request_that_outlives_its_time_is_a_504(path: str, gateway: Gateway, tenant: TestTenant) -> None:
    """A request that ends at its time limit is answered with 504, on the routes of OpenAI's and Anthropic's form."""
    gateway.engine.refusal = LATE

    answer = await tenant.client.post(path, json=ASK[path])

    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["type"], error["message"]) == ("timeout_error", LATE.message)
    assert error.get("code", "deadline_exceeded") == "deadline_exceeded"


async def test_a_stream_that_outlives_its_time_ends_with_the_error(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream that has begun ends with `deadline_exceeded` as its last event, after the tokens."""
    gateway.engine.breakage, gateway.engine.breaks_after = LATE, 2

    answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=True))

    *_, last = data_lines(answer.text)
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"


async def test_a_turn_that_outlives_its_time_fails_with_the_error(gateway: Gateway, tenant: TestTenant) -> None:
    """A session's turn that ends at its time limit is stored as failed with `deadline_exceeded`."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()
    gateway.engine.breakage, gateway.engine.breaks_after = LATE, 2

    turn = await tenant.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Hello"})

    assert (turn.json()["status"], turn.json()["error"]["code"]) == ("failed", "deadline_exceeded")


async def test_every_request_to_the_engine_has_the_time_limit(gateway: Gateway, tenant: TestTenant) -> None:
    """`request_timeout_s` is the limit of each request to the engine, of chats and of turns."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()

    await tenant.client.post("/v1/chat/completions", json=chat())
    await tenant.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Hello"})

    limit_s = gateway.resources.server.settings.request_timeout_s
    assert [request.timeout_s for request in gateway.engine.requests] == [limit_s, limit_s]


async def test_the_document_promises_504_where_tokens_are_generated(gateway: Gateway) -> None:
    """The OpenAPI document has a 504 for exactly the routes that the engine works for."""
    document = gateway.app.openapi()

    promised = {
        path
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "504" in operation["responses"]
    }

    turns = {"/v1/sessions/{session_id}/turns", "/v1/sessions/{session_id}/tool_outputs"}
    assert promised == {*ASK, *turns, "/v1/embeddings"}
