"""Tests of rolling windows on the routes: which requests and session commands bring one to the engine."""

from typing import Any

import pytest

from graftwork.engine.core.sampling import RollingWindow
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, chat

WINDOW: dict[str, Any] = {"attention_window": 256, "attention_sinks": 3}


async def test_the_window_reaches_the_engine_from_every_route(gateway: Gateway, tenant: TestTenant) -> None:
    """From chats, completions, responses and sessions; a request that names none attends to everything."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny", "sampling": WINDOW})).json()
    bodies = {
        "/v1/chat/completions": chat(**WINDOW),
        "/v1/completions": {"model": "tiny", "prompt": "Hello", **WINDOW},
        "/v1/responses": {"model": "tiny", "input": "Hello", **WINDOW},
        f"/v1/sessions/{session['id']}/turns": {"input": "Hello"},
    }

    for route, body in bodies.items():
        assert (await tenant.client.post(route, json=body)).status_code == 200, route
    await tenant.client.post("/v1/chat/completions", json=chat())

    found = [request.sampling.rolling_window for request in gateway.engine.requests]
    assert found == [RollingWindow(3, 256)] * 4 + [None]


async def test_commands_of_a_session_bring_its_window(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine finds the KV of a session by the window of its turns, and that of another session without one."""
    for sampling in (WINDOW, {}):
        session = (await tenant.client.post("/v1/sessions", json={"model": "tiny", "sampling": sampling})).json()["id"]
        await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "Hello"})
        gateway.engine.session_commands.clear()

        await tenant.client.post(f"/v1/sessions/{session}/suspend")
        await tenant.client.delete(f"/v1/sessions/{session}")

        wanted = RollingWindow(3, 256) if sampling else None
        assert {command.window for command in gateway.engine.session_commands} == {wanted}


@pytest.mark.parametrize(("field", "value"), [("attention_window", 0), ("attention_sinks", 4)])
async def test_a_wrong_window_is_refused_with_the_field(tenant: TestTenant, field: str, value: int) -> None:
    """A window of nothing, and sinks without a window, are refused with the field: of a chat, and of a session."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat() | {field: value})
    session = await tenant.client.post("/v1/sessions", json={"model": "tiny", "sampling": {field: value}})

    assert (answer.status_code, session.status_code) == (400, 422)
    assert answer.json()["error"]["param"] == field
    assert session.json()["error"]["param"] == f"sampling.{field}"


@pytest.mark.parametrize("sampling", [WINDOW, {}], ids=["with a window", "without"])
async def test_a_session_with_a_window_outgrows_the_context(
    gateway: Gateway, tenant: TestTenant, sampling: dict[str, Any]
) -> None:
    """Turn by turn, its prompts become longer than the context; those of a session without a window are refused there."""
    created = await tenant.client.post("/v1/sessions", json={"model": "tiny", "sampling": sampling})
    turns, word = f"/v1/sessions/{created.json()['id']}/turns", "window " * (CONTEXT_TOKENS // 16)
    answers = [await tenant.client.post(turns, json={"input": word}) for _ in range(40)]

    longest = max(len(request.prompt_token_ids) for request in gateway.engine.requests)
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert (longest > 2 * CONTEXT_TOKENS) == bool(sampling)
    assert set(refused) == (set() if sampling else {"context_length_exceeded"})


async def test_an_answer_with_a_window_may_pass_the_context(gateway: Gateway, tenant: TestTenant) -> None:
    """As many tokens as a chat or a completion asks for, and one context's worth if it names no number."""
    asked = {"max_completion_tokens": 3 * CONTEXT_TOKENS}
    for body in (chat() | asked, chat(**WINDOW) | asked, chat(**WINDOW)):
        await tenant.client.post("/v1/chat/completions", json=body)
    completion = {"model": "tiny", "prompt": "Hello", "max_tokens": 3 * CONTEXT_TOKENS, **WINDOW}
    await tenant.client.post("/v1/completions", json=completion)

    found = [request.sampling.max_tokens for request in gateway.engine.requests]
    assert found[0] < CONTEXT_TOKENS
    assert found[1:] == [3 * CONTEXT_TOKENS, CONTEXT_TOKENS, 3 * CONTEXT_TOKENS]
