"""A gateway on a free port of this machine and on its own thread, for blocking clients."""

import asyncio
import shutil
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from graftwork.api.server.app import create_app
from graftwork.api.server.wiring import open_resources
from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.errors import GraftworkError
from graftwork.platform.settings.settings import Settings
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import ADMIN_KEY


@dataclass
class QueuedTextEngine(FakeEngine):
    """Answers each request with the next of `lines`, and with `text` when there are no more."""

    lines: deque[str] = field(default_factory=deque)
    on_hold: Callable[[], None] | None = None
    """Called when a request begins to wait."""

    refusals: deque[GraftworkError | None] = field(default_factory=deque)
    """What the next requests are refused with, None to be answered; then all are answered."""

    async def hold(self) -> None:
        if self.on_hold is not None:
            self.on_hold()
        await super().hold()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.refusal = self.refusals.popleft() if self.refusals else None
        if self.refusal is None and self.lines:
            self.text = self.lines.popleft()
        async for event in super().generate(request):
            yield event


@dataclass(frozen=True)
class LiveGateway:
    """The address of a listening gateway, and its keys."""

    url: str
    key: str
    engine: QueuedTextEngine
    admin_key: str = ADMIN_KEY


class _Server(uvicorn.Server):
    """A server that reports when it listens."""

    def __init__(self, app: FastAPI, listening: threading.Event) -> None:
        super().__init__(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off"))
        self._listening = listening

    async def startup(self, sockets: object = None) -> None:
        await super().startup()
        self._listening.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


@contextmanager
def listening_gateway(data_dir: Path, model: Path, database: Path, **changes: Any) -> Iterator[LiveGateway]:
    """Runs a gateway with one tenant, `acme`. `database` is an upgraded SQLite file, which is copied.

    `changes` are settings that differ.
    """
    shutil.copy(database, data_dir / "graftwork.db")
    settings = Settings(data_dir=data_dir, model=model, admin_key=ADMIN_KEY, pepper="a pepper for tests", **changes)
    engine, listening = QueuedTextEngine(), threading.Event()
    started: list[tuple[_Server, str]] = []

    async def live() -> None:
        async with open_resources(settings, engine=engine) as resources:
            tenant = await resources.account.tenancy.create_tenant("acme")
            _, key = await resources.account.tenancy.create_key(tenant.id, "first")
            server = _Server(create_app(settings, resources=resources), listening)
            started.append((server, key))
            await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    assert listening.wait(timeout=60)
    ((server, key),) = started
    try:
        yield LiveGateway(server.url, key, engine)
    finally:
        server.should_exit = True
        thread.join()
