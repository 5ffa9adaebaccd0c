"""Tests that the ledger has what the engines reported after engines and gateways were killed."""

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import free_port, select_nothing_for
from tests.end_to_end.test_fleet import TwoEngines

_LOOKS = 600
_AGENTS = 6
_LONG = 1500
"""More tokens than are generated between the first ones of all streams and a kill."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TwoEngines]:
    """A server with two engines, which the test kills."""
    settings = {"GRAFTWORK_REPLICAS": "2", "GRAFTWORK_LEASE_S": "2"}
    server = TwoEngines(tmp_path, free_port(), settings)
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.kill()


def check(server: TwoEngines) -> dict[str, Any]:
    with server.admin() as admin:
        answer = admin.get("/v1/admin/usage/check", params={"settled_s": 0})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def interrupted(server: TwoEngines) -> int:
    """How many requests are billed as those of a gateway that died."""
    with closing(sqlite3.connect(server.data_dir / "graftwork.db")) as database:
        rows = database.execute("SELECT COUNT(*) FROM usage_events WHERE outcome = 'interrupted'").fetchone()
    return int(rows[0])


def settled(server: TwoEngines, requests: int, cut: int = 0) -> dict[str, Any]:
    """The check, once it has so many requests of clients, so many that a killed gateway cut, and no difference."""
    body = check(server)
    for _ in range(_LOOKS):
        found = sum(one["requests"] for one in body["compared"] if one["verdict"] != "own")
        if found >= requests and interrupted(server) >= cut and body["differences"] == 0:
            return body
        select_nothing_for(0.1)
        body = check(server)
    raise AssertionError(f"the ledger and the engines' reports differ: {json.dumps(body, indent=1)}")


def reported(body: dict[str, Any], field: str) -> int:
    return sum(int(one["reported"][field]) for one in body["compared"])


def stream(
    server: TwoEngines,
    number: int,
    leave_after: int | None = None,
    tokens: int = 200,
    begun: Semaphore | None = None,
) -> int:
    """Streams a completion of so many tokens, and returns its pieces. Releases `begun` at the first.

    Leaves after some of them; a killed server cuts it.
    """
    prompt = f"Number {number}: the harbour"
    body = {"model": "graftwork-demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    pieces = 0
    try:
        with (
            server.tenant() as client,
            client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                is_piece = line.startswith("data: {")
                pieces += is_piece
                if begun is not None and is_piece and pieces == 1:
                    begun.release()
                if pieces == leave_after:
                    break
    except httpx.TransportError:
        pass
    return pieces


def take_turn(server: TwoEngines, number: int) -> int:
    """Runs a turn of a new session to whatever end it has. Returns 1."""
    try:
        with server.tenant() as client:
            session = client.post("/v1/sessions", json={"model": "graftwork-demo"}).json()["id"]
            sampling = {"max_tokens": 200, "ignore_eos": True}
            client.post(f"/v1/sessions/{session}/turns", json={"input": f"Number {number}", "sampling": sampling})
    except httpx.TransportError:
        pass
    return 1


def work(server: TwoEngines, threads: ThreadPoolExecutor) -> list[Any]:
    """Begins long streams, turns and a client that leaves; returns once each long stream has its first tokens.

    The loads of the engines would not tell: they may be those of an earlier moment.
    """
    begun = Semaphore(0)
    running = [threads.submit(stream, server, number, None, _LONG, begun) for number in range(_AGENTS)]
    running += [threads.submit(take_turn, server, number) for number in range(2)]
    running.append(threads.submit(stream, server, 99, 5))
    for _ in range(_AGENTS):
        assert begun.acquire(timeout=60.0), f"the work never began: {server.replicas()}"
    return running


def test_the_ledger_has_what_the_engines_reported_after_chaos(fleet: TwoEngines) -> None:
    """With all at peace, the reports are what the engines have counted. After a lost engine, clients that left and a
    gateway that was killed with its engines, no request differs from its reports."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: stream(fleet, number), range(4)))
    peace = settled(fleet, 4)
    counted = {name: sum(one[name] for one in peace["engines"]) for name in ("prompt_tokens", "generated_tokens")}
    names = {"prompt_tokens": "prompt_tokens", "generated_tokens": "completion_tokens"}
    assert counted == {name: reported(peace, field) for name, field in names.items()}

    with ThreadPoolExecutor(_AGENTS + 3) as threads:
        running = work(fleet, threads)
        fleet.kill_replica(min(fleet.replicas()))
        assert all(one.result() for one in running)
        settled(fleet, 4 + len(running))
        fleet.when_ready()
        running = work(fleet, threads)
        fleet.kill()
    fleet.start()

    # A journal is read some time after the start. Of a request that had just begun, the ledger may have every token.
    end = settled(fleet, 4 + len(running) + _AGENTS, cut=_AGENTS)
    assert {one["verdict"] for one in end["compared"]} >= {"agrees", "again"}
    assert end["differences"] == 0
