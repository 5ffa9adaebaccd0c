"""Tests of a server whose number of engines follows its load."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.end_to_end.conftest import DemoServer, free_port, select_nothing_for

_LOOKS = 1200


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    settings = {"MAX_REPLICAS": "2", "SCALE_FIRST_TOKEN_S": "0.2", "SCALE_DOWN_AFTER_S": "5", "MAX_WAITING": "512"}
    folder = tmp_path_factory.mktemp("scaling")
    server = DemoServer(folder, free_port(), {f"GRAFTWORK_{name}": value for name, value in settings.items()})
    server.start()
    yield server
    server.stop()


def replicas(server: DemoServer) -> dict[str, str]:
    """The status of each engine."""
    headers = {"authorization": f"Bearer {server.admin_key()}"}
    answer = httpx.get(f"{server.url}/v1/admin/replicas", headers=headers, timeout=60)
    return {one["id"]: one["status"] for one in answer.json()["data"]}


def when(server: DemoServer, wanted: dict[str, str]) -> None:
    found = {}
    for _ in range(_LOOKS):
        if (found := replicas(server)) == wanted:
            return
        select_nothing_for(0.1)
    raise AssertionError(f"the engines never were {wanted}, but {found}")


@pytest.mark.slow
def test_a_queue_starts_an_engine_which_ends_when_nothing_needs_it(server: DemoServer) -> None:
    """Under a queue a second engine starts, without load it drains and ends, and no request fails; then all again."""
    headers = {"authorization": f"Bearer {server.key('Plain')}"}
    is_over = False

    def ask(number: int) -> list[int]:
        statuses = list[int]()
        with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
            while not is_over:
                prompt = f"{number} {len(statuses)} " + "tell me a story about the harbour " * 60
                body = {"model": "graftwork-demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                statuses.append(client.post("/v1/completions", json=body).status_code)
        return statuses

    assert replicas(server) == {"engine-0": "ready"}
    for _ in range(2):
        is_over = False
        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, number) for number in range(16)]
            try:
                when(server, {"engine-0": "ready", "engine-1": "ready"})
            finally:
                is_over = True
            statuses = [status for answer in answers for status in answer.result()]
        assert set(statuses) == {200}
        for _ in range(_LOOKS):
            if list(replicas(server).values()) == ["ready"]:
                break
            select_nothing_for(0.1)
        else:
            raise AssertionError("no engine ended")


@pytest.fixture
def rare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """A server whose last engine ends after two seconds without requests."""
    settings = {"REPLICAS": "0", "MAX_REPLICAS": "1", "SCALE_DOWN_AFTER_S": "2"}
    folder = tmp_path_factory.mktemp("rare")
    server = DemoServer(folder, free_port(), {f"GRAFTWORK_{name}": value for name, value in settings.items()})
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_a_rare_model_has_an_engine_only_while_it_is_used(rare: DemoServer) -> None:
    """Without requests the last engine ends, and health and readiness hold; the next request starts one and is answered
    as before; one that cannot wait gets a 503 with the seconds until an engine is there."""
    headers = {"authorization": f"Bearer {rare.key('Plain')}"}
    body = {"model": "graftwork-demo", "prompt": "The harbour", "max_tokens": 8, "temperature": 0}

    with httpx.Client(base_url=rare.url, headers=headers, timeout=120) as client:
        first = client.post("/v1/completions", json=body)
        when(rare, {})
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        refused = client.post("/v1/completions", json=body, headers={"x-deadline-ms": "20"})
        second = client.post("/v1/completions", json=body)
        statuses = replicas(rare)
        when(rare, {})

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_engine"
    assert int(refused.headers["retry-after"]) >= 1
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["choices"] == second.json()["choices"]
    assert statuses == {"engine-0": "ready"}
