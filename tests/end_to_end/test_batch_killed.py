"""Tests that a batch outlives kill -9 of the gateways that run it, on SQLite and on PostgreSQL."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.in_process_gateway import ADMIN_KEY, chat, write_model_folder

NUM_LINES, NUM_KILLS, WITHIN_S, LEASE_S = 80, 3, 240, 4.0
END = ("completed", "failed", "expired", "cancelled")


class KillableGateway:
    """A gateway in a process of its own, which can be killed and started again on the same data."""

    def __init__(self, stack: ExitStack, options: dict[str, Any]) -> None:
        self._stack = stack
        self._options = options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.api.gateway_process", json.dumps(self._options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        self._stack.callback(self.process.communicate)
        self._stack.callback(self.process.kill)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=30)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KillableGateway]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    options = {
        "model": str(write_model_folder(tmp_path / "model")),
        "data_dir": str(tmp_path / "data"),
        "port": 0,
        "database_url": url,
        "admin_key": ADMIN_KEY,
        "pepper": "a pepper for tests",
        "lease_s": LEASE_S,
    }
    with ExitStack() as stack:
        yield KillableGateway(stack, options)


def new_key(gateway: KillableGateway) -> str:
    with gateway.client(ADMIN_KEY) as admin:
        tenant = admin.post("/v1/admin/tenants", json={"name": "Acme"}).json()["id"]
        key: str = admin.post(f"/v1/admin/tenants/{tenant}/keys", json={"name": "first"}).json()["key"]
        return key


def progress(gateway: KillableGateway, key: str, batch_id: str) -> dict[str, Any]:
    with gateway.client(key) as client:
        found: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
        return found


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
def test_a_batch_outlives_kills(gateway: KillableGateway, endpoint: str) -> None:
    """After kill -9 of its gateway at several points, a batch has one answer and one bill for each line."""
    key = new_key(gateway)
    is_turn = endpoint == "/v1/responses"
    custom_ids = [f"request-{number}" for number in range(NUM_LINES)]
    bodies = [{"model": "tiny", "input": one} if is_turn else chat(one) for one in custom_ids]
    lines = [
        {"custom_id": one, "method": "POST", "url": endpoint, "body": body}
        for one, body in zip(custom_ids, bodies, strict=True)
    ]
    with gateway.client(key) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch_id = client.post("/v1/batches", json=body).json()["id"]
    noise, kills, ends_at = random.Random(5), list[int](), time.monotonic() + WITHIN_S
    goals = sorted(noise.sample(range(1, NUM_LINES), NUM_KILLS))

    while (seen := progress(gateway, key, batch_id))["status"] not in END:
        assert time.monotonic() < ends_at, seen
        if goals and seen["request_counts"]["completed"] >= goals[0]:
            gateway.process.kill()
            gateway.process.wait()
            kills.append(seen["request_counts"]["completed"])
            goals = [goal for goal in goals if goal > kills[-1]]
            gateway.start()

    with gateway.client(key) as client:
        output = client.get(f"/v1/files/{seen['output_file_id']}/content").text.splitlines()
        (usage,) = client.get("/v1/usage", params={"group_by": "tier"}).json()["data"]
    assert len(kills) >= 2
    assert (seen["status"], seen["request_counts"]) == (
        "completed",
        {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0},
    )
    answers = [json.loads(each) for each in output]
    assert Counter(one["custom_id"] for one in answers) == Counter(custom_ids)
    assert (usage["group"], usage["requests"]) == ("flex", NUM_LINES)
    tokens = sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers)
    assert usage["total_tokens"] == seen["usage"]["total_tokens"] == tokens
