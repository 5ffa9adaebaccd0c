"""Tests of an engine that is killed while it answers."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from graftwork.demo.tasks import TOOLS
from tests.end_to_end.conftest import DemoServer

_WITHIN_S = 60


@pytest.fixture
def client(restartable: DemoServer) -> Iterator[httpx.Client]:
    """A tenant of a server of its own."""
    restartable.start()
    headers = {"authorization": f"Bearer {restartable.key('Corner')}"}
    with httpx.Client(base_url=restartable.url, headers=headers, timeout=60) as client:
        yield client


def begin_session(client: httpx.Client) -> str:
    """Creates a session with tools that has had one turn."""
    body = {"model": "helpdesk", "tools": list(TOOLS.values()), "sampling": {"temperature": 0}}
    session = client.post("/v1/sessions", json=body)
    assert session.status_code == 201, session.text
    path = f"/v1/sessions/{session.json()['id']}"
    assert take_turn(client, path, "Hello!")["status"] == "completed"
    return path


def take_turn(client: httpx.Client, path: str, text: str) -> dict[str, Any]:
    """Runs a turn. Repeats it while there is no engine, as clients do."""
    deadline = time.monotonic() + _WITHIN_S
    while (answer := client.post(f"{path}/turns", json={"input": text})).status_code == 503:
        assert time.monotonic() < deadline, answer.text
    assert answer.status_code == 200, answer.text
    turn: dict[str, Any] = answer.json()
    return turn


def wait_for_disk(client: httpx.Client, path: str) -> dict[str, Any]:
    """Returns a session's cache once the disk has as many pages as the host."""
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        cache: dict[str, Any] = client.get(f"{path}/cache").json()
        if 0 < cache["tiers"]["host"]["bytes"] == cache["tiers"]["disk"]["bytes"]:
            return cache
    raise AssertionError("the session never came to the disk")


def billed_tokens(client: httpx.Client) -> int:
    return sum(int(row["total_tokens"]) for row in client.get("/v1/usage").json()["data"])


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_a_turn_that_its_engine_does_not_survive_fails_and_the_session_goes_on_from_disk(
    restartable: DemoServer, client: httpx.Client
) -> None:
    """After kill -9 during a turn the stream ends with a typed error, and the session continues from its last
    checkpoint and the files on disk with the same tokens. The failed turn costs nothing."""
    path = begin_session(client)
    head = client.get(path).json()["head"]
    cache = wait_for_disk(client, path)
    billed_before = billed_tokens(client)
    long_turn = {"input": "Tell me more.", "stream": True, "sampling": {"ignore_eos": True, "max_tokens": 1500}}

    with client.stream("POST", f"{path}/turns", json=long_turn) as answer:
        events = events_of(answer)
        while next(events)["type"] != "output_text.delta":
            continue
        restartable.kill_engine()
        *_, last = events
    billed_after = billed_tokens(client)
    at_once = client.post(f"{path}/turns", json={"input": "Who are you?"})
    kept = client.get(path).json()["head"]
    resumed = take_turn(client, path, "Who are you?")
    undisturbed = take_turn(client, begin_session(client), "Who are you?")

    assert (last["type"], last["error"]["code"]) == ("turn.failed", "engine_unavailable")
    assert (at_once.status_code, at_once.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(at_once.headers["retry-after"]) >= 1
    assert kept == head
    assert billed_after == billed_before > 0
    history = sum(cache["tiers"][tier]["tokens"] for tier in ("device", "host", "disk"))
    assert resumed["cache"]["disk_tokens"] == history > 0
    assert resumed["cache"]["device_tokens"] == resumed["cache"]["host_tokens"] == 0
    assert resumed["usage"]["prompt_tokens"] == history + resumed["cache"]["recomputed_tokens"]
    assert resumed["output"][0]["content"] == undisturbed["output"][0]["content"]


def test_a_killed_gateway_has_billed_what_it_streamed(restartable: DemoServer) -> None:
    """After a kill of the server during a chat, the usage has a row with all tokens that the client has read."""
    server = restartable
    server.start()
    headers = {"authorization": f"Bearer {server.key('Corner')}"}
    body = {"model": "helpdesk", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    body |= {"max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
    num_read = 0
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", headers=headers, json=body, timeout=60) as answer:
        for event in events_of(answer):
            num_read += bool(event["choices"] and event["choices"][0]["delta"].get("content"))
            if num_read == 30:
                server.kill()
                break

    server.start()

    usage = httpx.get(f"{server.url}/v1/usage", headers=headers).json()
    assert usage["data"][0]["completion_tokens"] >= num_read
    assert usage["data"][0]["prompt_tokens"] > 0
