"""Tests of an engine that is stopped, as by SIGSTOP or a debugger, while it answers."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.end_to_end.conftest import DemoServer

_WITHIN_S = 120
LONG = {"model": "graftwork-demo", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture
def client(restartable: DemoServer) -> Iterator[httpx.Client]:
    """A tenant of a server of its own that misses its engine after three seconds: a busy machine answers later than in
    one.
    """
    restartable.settings["GRAFTWORK_ENGINE_SILENCE_S"] = "3"
    restartable.start()
    headers = {"authorization": f"Bearer {restartable.key('Plain')}"}
    with httpx.Client(base_url=restartable.url, headers=headers, timeout=_WITHIN_S) as client:
        yield client


def test_a_frozen_engine_ends_its_streams_and_is_replaced(restartable: DemoServer, client: httpx.Client) -> None:
    """If the engine stops without ending, running streams end with 503's error, new requests and `/readyz` get a 503,
    and another engine takes its place."""
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        frozen = restartable.engine()
        frozen.suspend()
        *_, last = lines
    at_once = client.post("/v1/completions", json={**LONG, "stream": False})
    readiness = client.get("/readyz")

    assert json.loads(last)["error"]["code"] == "engine_unavailable"
    assert (at_once.status_code, at_once.json()["error"]["code"]) == (503, "engine_unavailable")
    assert readiness.status_code == 503
    assert "engine" in readiness.json()["problems"]
    deadline = time.monotonic() + _WITHIN_S
    while client.post("/v1/completions", json={**LONG, "stream": False, "max_tokens": 2}).status_code != 200:
        assert time.monotonic() < deadline
    assert not frozen.is_running()
    assert restartable.engine().pid != frozen.pid


def test_an_engine_that_goes_on_serves_again(restartable: DemoServer, client: httpx.Client) -> None:
    """An engine that is stopped for a moment, and not for long, goes on with its streams."""
    with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 300}) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        engine = restartable.engine()
        engine.suspend()
        engine.resume()
        *_, last = lines

    assert last == "[DONE]"
    assert restartable.engine().pid == engine.pid
