"""The served demo, used as its users do: tools, sessions, restarts, disconnects, bad input."""

import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from openai import OpenAI

from graftwork import Graftwork
from graftwork.demo.tasks import TOOLS, Case, held_out_cases
from tests.end_to_end.conftest import DemoServer, free_port

PAGE = 16


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form, where the arguments of a call are text."""
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for number, call in enumerate(message.get("tool_calls", ()))
    ]
    sent = {key: value for key, value in message.items() if key != "tool_calls"}
    if message["role"] == "tool":
        sent["tool_call_id"] = "call_0"
    return sent | ({"tool_calls": calls} if calls else {})


def ask(client: OpenAI, case: Case) -> tuple[list[tuple[str, dict[str, Any]]], str | None]:
    """Stream one answer; the calls it made, and why it ended."""
    names: list[str] = []
    arguments: list[str] = []
    finish = None
    model = client.models.list().data[0].id
    messages, tools = cast("Any", [as_sent(message) for message in case.messages]), cast("Any", case.tools)
    for chunk in client.chat.completions.create(
        model=model, messages=messages, tools=tools, stream=True, temperature=0
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(names):
                names.append(call.function.name or "")
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)], finish


def test_tool_calls_stream_through_the_openai_package(server: DemoServer) -> None:
    """Of twenty questions with unseen names, at least eighteen stream exactly the call that is asked for."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key=server.key("Plain"))
    right = 0

    for case in held_out_cases("base", 20, seed=5, kind="call"):
        calls, finish = ask(client, case)
        expected = json.loads(case.expected.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        right += calls == [(expected["name"], expected["arguments"])]
        assert finish == ("tool_calls" if calls else "stop")

    assert right >= 18


def test_a_second_turn_recomputes_only_what_is_new(server: DemoServer) -> None:
    """Of a session's second turn, all but the new items and at most one page comes from the cache."""
    with Graftwork(server.url, api_key=server.key("Blackbeard")) as client:
        session = client.sessions.create(model="pirate", tools=list(TOOLS.values()), sampling={"temperature": 0})
        first = session.turn("Hello!")
        second = session.turn("Thanks!")

    assert first.usage is not None
    assert second.usage is not None
    history = first.usage.prompt_tokens + first.usage.completion_tokens
    new = second.usage.prompt_tokens - history
    details = second.usage.prompt_tokens_details
    assert new > 0
    assert details.cached_tokens + details.recomputed_tokens == second.usage.prompt_tokens
    assert details.recomputed_tokens <= new + PAGE


def test_a_client_that_disconnects_frees_its_pages(server: DemoServer) -> None:
    """After a stream is dropped in the middle, the page gauges are where they were before it."""
    gauges = [f'graftwork_kv_pages{{state="{state}",tier="device"}}' for state in ("free", "owned", "in_flight")]
    headers = {"authorization": f"Bearer {server.key('Plain')}"}
    before = server.metrics_once(lambda metrics: metrics["graftwork_running_requests"] == 0)
    model = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"]
    body = {"model": model, "prompt": "Once ", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    with httpx.stream("POST", f"{server.url}/v1/completions", headers=headers, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        for _ in range(5):
            next(lines)
        assert server.metrics()["graftwork_running_requests"] == 1

    after = server.metrics_once(lambda metrics: metrics["graftwork_running_requests"] == 0)
    assert [after[gauge] for gauge in gauges] == [before[gauge] for gauge in gauges]


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_session_goes_on_after_a_restart_exactly_where_it_was(tmp_path: Path, ending: str) -> None:
    """With the server stopped or killed between two turns, the second turn is what it is without that."""
    server = DemoServer(tmp_path, free_port())

    def begin() -> str:
        with Graftwork(server.url, api_key=server.key("Corner")) as client:
            session = client.sessions.create(model="helpdesk", sampling={"temperature": 0})
            session.turn("Hello!")
            return session.id

    def go_on(session_id: str) -> tuple[str, list[str], int]:
        with Graftwork(server.url, api_key=server.key("Corner")) as client:
            session = client.sessions.get(session_id)
            turn = session.turn("Who are you?")
            assert turn.usage is not None
            return turn.text, [item.text for item in session.items()], turn.usage.prompt_tokens

    server.start()
    undisturbed = go_on(begin())
    interrupted = begin()
    if ending == "stop":
        assert server.stop() == 0
    else:
        server.kill()
    server.start()
    resumed = go_on(interrupted)
    assert server.stop() == 0

    assert resumed == undisturbed


def test_bad_input_is_told_what_is_wrong(server: DemoServer, tmp_path: Path) -> None:
    """Wrong key 401, unknown and foreign ids 404 alike, over the context 400 with both numbers."""
    plain = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key('Plain')}"})
    model = plain.get("/v1/models").json()["data"][0]["id"]
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}]}

    wrong_key = httpx.post(f"{server.url}/v1/chat/completions", headers={"authorization": "Bearer gw_x_y"}, json=chat)
    with Graftwork(server.url, api_key=server.key("Corner")) as client:
        foreign_id = client.sessions.create(model=model).id
    foreign, unknown = plain.get(f"/v1/sessions/{foreign_id}"), plain.get("/v1/sessions/ses_nobody")
    foreign_adapter = plain.post("/v1/chat/completions", json=chat | {"model": "pirate"})
    too_long = plain.post("/v1/completions", json={"model": model, "prompt": [5] * 5000, "max_tokens": 5})

    assert wrong_key.status_code == 401
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert foreign.text.replace(foreign_id, "ID") == unknown.text.replace("ses_nobody", "ID")
    assert foreign_adapter.status_code == 404
    assert too_long.status_code == 400
    assert "5000" in too_long.json()["error"]["message"]
    assert all("x-request-id" in answer.headers for answer in (wrong_key, foreign, unknown, too_long))
