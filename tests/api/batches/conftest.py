"""A gateway whose batches run when a test says so."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.api.batches.assembly import batch_runner
from graftwork.api.batches.runner import BatchRunner, RunnerLimits
from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.gateways.lease import GatewayLease
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import Gateway, TestTenant, gateway_settings, open_gateway

CHAT = "/v1/chat/completions"


@dataclass
class Batching:
    """A runner of batches beside the gateway's own, which acts only when it is told to."""

    gateway: Gateway
    runner: BatchRunner

    async def run(self) -> None:
        """Claims the batches that nobody runs, and runs them to their ends."""
        await self.runner.tick()
        await self.runner.drained()


async def living_lease(gateway: Gateway) -> GatewayLease:
    """The lease of one more gateway on the same database, which lives for as long as the test."""
    lease = GatewayLease(lease_s=3600.0)
    async with gateway.resources.server.database.write() as session:
        await lease.renew(session)
    return lease


async def new_runner(gateway: Gateway, lease: GatewayLease | None = None) -> BatchRunner:
    """One more runner on the same database. It acts only when it is told to."""
    return batch_runner(gateway.resources, lease or await living_lease(gateway), RunnerLimits(8, 4, max_lines=20))


@dataclass
class GatedEngine(FakeEngine):
    """Begins each answer only when it gets one of the `permits`, or when the gate is open."""

    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    is_open: bool = False
    num_waiting: int = 0
    most_waiting: int = 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        if not self.is_open:
            self.num_waiting += 1
            self.most_waiting = max(self.most_waiting, self.num_waiting)
            try:
                await self.permits.acquire()
            finally:
                self.num_waiting -= 1
        async for event in super().generate(request):
            yield event

    def open(self) -> None:
        """Lets all requests pass, those that wait and all later ones."""
        self.is_open = True
        for _ in range(self.num_waiting):
            self.permits.release()


async def until(is_so: Callable[[], bool]) -> None:
    """Lets the event loop run until something is so."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0)


@pytest.fixture
async def gateway(
    tmp_path: Path, tiny_model: Path, sqlite_template: Path, inspector: AdapterInspector
) -> AsyncIterator[Gateway]:
    """A gateway that leaves batches to others."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    settings = replace(gateway_settings(tmp_path, tiny_model), batch_concurrency=0, max_batch_requests=20)
    async with open_gateway(settings, inspector, GatedEngine(is_open=True)) as gateway:
        yield gateway


@pytest.fixture
async def batching(gateway: Gateway) -> AsyncIterator[Batching]:
    runner = await new_runner(gateway)
    yield Batching(gateway, runner)
    await runner.close()


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """One line of an input file."""
    messages = [{"role": "user", "content": "What is the weather?"}]
    full = {"model": "tiny", "messages": messages} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": full}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def upload(tenant: TestTenant, content: bytes) -> str:
    answer = await tenant.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("requests.jsonl", content)}
    )
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


async def create(tenant: TestTenant, lines: Iterable[Any], endpoint: str = CHAT) -> dict[str, Any]:
    """Uploads lines, and creates a batch of them."""
    body = {"input_file_id": await upload(tenant, jsonl(lines)), "endpoint": endpoint, "completion_window": "24h"}
    answer = await tenant.client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    created: dict[str, Any] = answer.json()
    return created


async def get(tenant: TestTenant, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (await tenant.client.get(f"/v1/batches/{batch['id']}")).json()
    return found


async def lines_of(tenant: TestTenant, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file; none without a file."""
    if file_id is None:
        return []
    answer = await tenant.client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    return [json.loads(each) for each in answer.text.splitlines()]
