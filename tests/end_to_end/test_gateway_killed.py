"""Tests of a gateway that is killed, or stopped for longer than its leases, while it holds places, keys and sessions."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.in_process_gateway import ADMIN_KEY, chat, write_model_folder
from tests.redis_process import running_redis

LEASE_S = 2.0
WITHIN_S = 60
"""The machine may be busy. The gateways renew their leases by real time."""
PLACES = 4
Send = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]
KEYS = [{"idempotency-key": f"k{number}"} for number in range(2)]


class Gateways:
    """Two gateways on one PostgreSQL and one Redis. The answers of the first never end."""

    def __init__(self, stack: ExitStack, folder: Path, database_url: str) -> None:
        model, redis = write_model_folder(folder / "model"), stack.enter_context(running_redis())
        shared = {
            "model": str(model),
            "data_dir": str(folder / "data"),
            "port": 0,
            "database_url": database_url,
            "redis_url": redis.url,
            "admin_key": ADMIN_KEY,
            "pepper": "a pepper for tests",
            "lease_s": LEASE_S,
        }
        self.first, self.first_url = self._start(stack, {**shared, "holds_after": 2})
        _, self.second_url = self._start(stack, shared)

    def _start(self, stack: ExitStack, options: dict[str, Any]) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "tests.api.gateway_process", json.dumps(options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def new_key(self) -> str:
        """The key of a new tenant, which may have PLACES requests at once."""
        with httpx.Client(base_url=self.second_url, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as admin:
            tenant = admin.post("/v1/admin/tenants", json={"name": "Acme"}).json()["id"]
            admin.put(f"/v1/admin/tenants/{tenant}/quota", json={"max_concurrent_requests": PLACES})
            key: str = admin.post(f"/v1/admin/tenants/{tenant}/keys", json={"name": "first"}).json()["key"]
            return key


@asynccontextmanager
async def work_on(gateways: Gateways) -> AsyncIterator["Work"]:
    """What a tenant has running, closed at the end in any case."""
    work = Work(gateways)
    try:
        await work.start()
        yield work
    finally:
        await work.close()


@pytest.fixture
def gateways(tmp_path: Path, postgres_url: str) -> Iterator[Gateways]:
    with ExitStack() as stack:
        yield Gateways(stack, tmp_path, postgres_url)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


class Work:
    """What a tenant has running on the first gateway: two chats, a turn and a response with their keys."""

    def __init__(self, gateways: Gateways) -> None:
        key = {"authorization": f"Bearer {gateways.new_key()}"}
        self.first = httpx.AsyncClient(base_url=gateways.first_url, headers=key, timeout=WITHIN_S)
        self.second = httpx.AsyncClient(base_url=gateways.second_url, headers=key, timeout=WITHIN_S)
        self.session = ""
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def start(self) -> None:
        self.session = (await self.second.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
        for send in (self.chat, self.chat, self.turn, self.response):
            self.tasks.append(asyncio.create_task(self.sent_to_first(send)))
        await until(self.is_full)
        await until(self.has_begun)

    async def sent_to_first(self, send: Send) -> httpx.Response:
        """Sends a request to the first gateway, again while `is_full` has its place."""
        while (answer := await send(self.first)).status_code == 429:
            continue
        return answer

    async def chat(self, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=chat())

    async def turn(self, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(f"/v1/sessions/{self.session}/turns", json={"input": "One"}, headers=KEYS[0])

    async def response(self, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/responses", json={"model": "tiny", "input": "Two"}, headers=KEYS[1])

    async def is_full(self) -> bool:
        answer = await self.chat(self.second)
        return answer.status_code == 429 and answer.json()["error"]["limit"] == "max_concurrent_requests"

    async def has_begun(self) -> bool:
        """Whether the turn is stored: it takes its place a little before."""
        session = await self.second.get(f"/v1/sessions/{self.session}")
        return bool(session.json()["status"] == "running")

    async def is_free(self) -> bool:
        """Whether the tenant has all its places: a request with as many answers fits."""
        answer = await self.second.post("/v1/chat/completions", json=chat(n=PLACES))
        return answer.status_code == 200

    async def answered_again(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The turn and the response that the second gateway gives for the keys, once it gives them."""
        answers: list[dict[str, Any]] = []
        for send in (self.turn, self.response):

            async def is_answered(send: Send = send) -> bool:
                answer = await send(self.second)
                if answer.status_code == 200 and answer.json()["status"] == "completed":
                    answers.append(answer.json())
                    return True
                assert answer.status_code in (200, 409, 429), answer.text
                return False

            await until(is_answered)
        return answers[0], answers[1]

    async def ended_turns(self) -> list[str]:
        """How the turns of the session ended, in their order."""
        events = await self.second.get(f"/v1/sessions/{self.session}/events")
        types = [line.removeprefix("event: ") for line in events.text.splitlines() if line.startswith("event: ")]
        return [event for event in types if event in ("turn.completed", "turn.failed", "turn.cancelled")]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.first.aclose()
        await self.second.aclose()


@pytest.mark.postgres
async def test_a_killed_gateway_leaves_nothing_taken(gateways: Gateways) -> None:
    """After kill -9 of a gateway, another one has its places, its keys and its sessions when its leases end; what it
    began runs again once under the same keys."""
    async with work_on(gateways) as work:
        gateways.first.kill()

        turn, response = await work.answered_again()
        await until(work.is_free)
        assert await work.ended_turns() == ["turn.failed", "turn.completed"]
        items = (await work.second.get(f"/v1/sessions/{work.session}/items")).json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant"]
        assert (await work.turn(work.second)).json()["id"] == turn["id"]
        assert (await work.response(work.second)).json()["id"] == response["id"]


@pytest.mark.postgres
async def test_a_stopped_gateway_comes_back_without_its_turns(gateways: Gateways) -> None:
    """A gateway that is stopped for longer than its leases loses its turns and keys to another one, and does not go on
    with them when it continues; the places of its chats, which do go on, count again."""
    async with work_on(gateways) as work:
        gateways.first.send_signal(signal.SIGSTOP)
        turn, response = await work.answered_again()
        await until(work.is_free)

        gateways.first.send_signal(signal.SIGCONT)

        async def two_chats_run() -> bool:
            sent = [work.second.post("/v1/chat/completions", json=chat(n=n)) for n in (PLACES - 1, PLACES - 2)]
            return [answer.status_code for answer in [await post for post in sent]] == [429, 200]

        await until(two_chats_run)
        assert (await work.turn(work.first)).json()["id"] == turn["id"]
        assert (await work.response(work.first)).json()["id"] == response["id"]
        assert await work.ended_turns() == ["turn.failed", "turn.completed"]
        gateways.first.kill()
        await until(work.is_free)
