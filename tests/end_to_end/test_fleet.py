"""Tests of a server with two engines, one of which is killed or drained while it answers."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.end_to_end.conftest import DemoServer, free_port, select_nothing_for

_TOKENS = 96
_LOOKS = 600


class TwoEngines(DemoServer):
    """A server with two engines."""

    def admin(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.admin_key()}"}, timeout=60)

    def tenant(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key('Plain')}"}, timeout=60)

    def replicas(self) -> dict[str, dict[str, Any]]:
        with self.admin() as client:
            return {one["id"]: one for one in client.get("/v1/admin/replicas").json()["data"]}

    def when_ready(self) -> dict[str, dict[str, Any]]:
        """Returns the replicas once both are ready."""
        for _ in range(_LOOKS):
            found = self.replicas()
            if all(one["status"] == "ready" for one in found.values()):
                return found
            select_nothing_for(0.1)
        raise AssertionError(f"the engines never got ready: {found}")

    def kill_replica(self, replica_id: str) -> None:
        """SIGKILL to the engine that listens at the replica's socket."""
        path = self.replicas()[replica_id]["address"].removeprefix("unix:")
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if any(connection.laddr == path for connection in child.net_connections("unix")):
                child.kill()
                return
        raise AssertionError(f"no process listens at {path}")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    server = TwoEngines(tmp_path_factory.mktemp("fleet"), free_port(), {"GRAFTWORK_REPLICAS": "2"})
    server.start()
    yield server
    server.stop()


def body(number: int, **sampling: object) -> dict[str, Any]:
    prompt = f"Number {number}: tell me a story about the harbour"
    return {
        "model": "graftwork-demo",
        "prompt": prompt,
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        **sampling,
    }


SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "frequency_penalty": 0.4},
]


def chunks(client: httpx.Client, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                yield chunk


def tokens(found: list[dict[str, Any]]) -> list[str]:
    """The tokens of a stream, in order."""
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return [token for choice in choices if choice.get("logprobs") for token in choice["logprobs"]["tokens"]]


def usage(found: list[dict[str, Any]]) -> dict[str, Any]:
    (only,) = [chunk["usage"] for chunk in found if chunk.get("usage")]
    return dict(only)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("number", range(3))
def test_a_stream_whose_engine_is_killed_is_that_of_an_undisturbed_run(
    fleet: TwoEngines, number: int, sampling: dict[str, object]
) -> None:
    """kill -9 at a random token: the caller's tokens, its text and its bill are those of a run that nothing has cut."""
    fleet.when_ready()
    with fleet.tenant() as client:
        expected = list(chunks(client, body(number, **sampling)))
        cut, found, killed = Random(str((number, sampling))).randrange(_TOKENS // 2), list[dict[str, Any]](), False
        for chunk in chunks(client, body(number, **sampling)):
            found.append(chunk)
            if len(found) > cut and not killed:
                busy = [name for name, one in fleet.replicas().items() if one.get("running_requests")]
                if busy:
                    fleet.kill_replica(busy[0])
                    killed = True

    assert tokens(found) == tokens(expected)
    assert len(tokens(found)) == _TOKENS
    assert usage(found)["completion_tokens"] == usage(expected)["completion_tokens"] == _TOKENS
    assert usage(found)["prompt_tokens"] == usage(expected)["prompt_tokens"]


@pytest.mark.slow
def test_draining_under_load_fails_no_request(fleet: TwoEngines) -> None:
    """While an engine drains and starts again, every request is answered; the other one cannot drain meanwhile."""
    before = fleet.when_ready()["engine-1"]["epoch"]

    def ask(number: int) -> int:
        with fleet.tenant() as client:
            return len(tokens(list(chunks(client, body(number, temperature=0)))))

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, number) for number in range(24)]
        with fleet.admin() as admin:
            drained = admin.post("/v1/admin/replicas/engine-1/drain")
            refused = admin.post("/v1/admin/replicas/engine-0/drain")
        lengths = [answer.result() for answer in answers]

    assert lengths == [_TOKENS] * 24
    assert (drained.status_code, drained.json()["status"]) == (200, "draining")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "only_replica"
    assert fleet.when_ready()["engine-1"]["epoch"] > before


@pytest.mark.slow
def test_a_session_survives_its_engine(fleet: TwoEngines) -> None:
    """A session whose engine is killed between two turns goes on, with the same history."""
    fleet.when_ready()
    with fleet.tenant() as client:
        made = client.post("/v1/sessions", json={"model": "graftwork-demo", "sampling": {"max_tokens": 16}})
        path = f"/v1/sessions/{made.json()['id']}"
        assert client.post(f"{path}/turns", json={"input": "One"}).json()["status"] == "completed"
        for name in fleet.replicas():
            fleet.kill_replica(name)
            answer = client.post(f"{path}/turns", json={"input": "Again"})
            assert answer.json()["status"] == "completed", answer.text
            fleet.when_ready()
        items = client.get(f"{path}/items").json()["data"]

    assert [item["role"] for item in items] == ["user", "assistant"] * 3
    assert Path(fleet.data_dir, "kv-1").is_dir()
