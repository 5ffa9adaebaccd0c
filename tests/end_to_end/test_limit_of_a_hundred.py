"""Tests that gateways in processes of their own, over one Redis, admit together what a limit allows, and not one more."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.in_process_gateway import ADMIN_KEY, chat, write_model_folder
from tests.redis_process import running_redis

WITHIN_S = 120.0
"""The machine may be busy."""
LIMIT, REQUESTS = 100, 1000
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[1, 3])
def urls(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str) -> Iterator[list[str]]:
    """The addresses of so many gateways, each a process, on one PostgreSQL and one Redis. Their answers never end."""
    with ExitStack() as stack:
        options = {
            "model": str(write_model_folder(tmp_path / "model")),
            "port": 0,
            "database_url": postgres_url,
            "redis_url": stack.enter_context(running_redis()).url,
            "admin_key": ADMIN_KEY,
            "pepper": "a pepper for tests",
            "holds_after": 1,
            "max_answers": 2 * REQUESTS,
        }
        started = [start(stack, options | {"data_dir": str(tmp_path / f"{number}")}) for number in range(request.param)]
        yield [url_of(process) for process in started]


def start(stack: ExitStack, options: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.api.gateway_process", json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def new_key(url: str, limit: str) -> str:
    """The key of a new tenant with this limit."""
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=WITHIN_S) as admin:
        tenant = admin.post("/v1/admin/tenants", json={"name": "Acme"}).json()["id"]
        admin.put(f"/v1/admin/tenants/{tenant}/quota", json={limit: LIMIT}).raise_for_status()
        key: str = admin.post(f"/v1/admin/tenants/{tenant}/keys", json={"name": "first"}).json()["key"]
        return key


async def outcomes(urls: list[str], key: str) -> Counter[object]:
    """Sends all requests at once, in turn to each gateway, and holds those that run until all have an answer."""
    told = Counter[object]()
    headers = {"authorization": f"Bearer {key}"}
    unbounded = httpx.Limits(max_connections=None)
    async with AsyncExitStack() as open_streams:
        clients = [
            await open_streams.enter_async_context(
                httpx.AsyncClient(base_url=url, headers=headers, timeout=WITHIN_S, limits=unbounded, trust_env=False)
            )
            for url in urls
        ]

        async def send(number: int) -> None:
            client = clients[number % len(clients)]
            request = client.build_request("POST", "/v1/chat/completions", json=chat(stream=True))
            answer = await client.send(request, stream=True)
            open_streams.push_async_callback(answer.aclose)
            refused = answer.status_code != 200 and json.loads(await answer.aread())["error"]["code"]
            told[refused or "admitted"] += 1

        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(send(number) for number in range(REQUESTS)))
    return told


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", ["max_concurrent_requests", "requests_per_minute"])
async def test_a_thousand_requests_against_a_limit_of_a_hundred(urls: list[str], limit: str) -> None:
    """Of 1,000 requests at once against a limit of 100, one gateway and three admit exactly 100, and refuse 900."""
    told = await outcomes(urls, new_key(urls[0], limit))

    assert told["admitted"] == LIMIT, told
    assert told.total() == REQUESTS
    assert len(told) == 2, told
