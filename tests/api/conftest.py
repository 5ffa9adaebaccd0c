"""A gateway for each test, with one tenant in it."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from graftwork.adapters.inspection import AdapterInspector
from graftwork.api.http_server import HttpServer
from graftwork.api.listening_socket import bind, url_of
from tests.adapters.shared_inspector import shared_inspector
from tests.api.harness import Gateway, TestTenant, gateway_settings, open_gateway, write_model_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def inspector() -> Iterator[AdapterInspector]:
    """Shared: a worker takes a quarter of a second to start."""
    with shared_inspector() as inspector:
        yield inspector


@pytest.fixture
async def gateway(
    tmp_path: Path, tiny_model: Path, sqlite_template: Path, inspector: AdapterInspector
) -> AsyncIterator[Gateway]:
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    async with open_gateway(gateway_settings(tmp_path, tiny_model), inspector) as gateway:
        yield gateway


@pytest.fixture
async def tenant(gateway: Gateway) -> AsyncIterator[TestTenant]:
    tenant = await gateway.tenant()
    async with tenant.client:
        yield tenant


@pytest.fixture
async def url(gateway: Gateway) -> AsyncIterator[str]:
    """Where the gateway listens."""
    ready = asyncio.Event()
    with bind("127.0.0.1", 0) as listening:
        server = HttpServer(gateway.app, ready.set)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await ready.wait()
        yield url_of(listening)
        server.stop()
        await serving


@pytest.fixture
async def client(url: str, tenant: TestTenant) -> AsyncIterator[AsyncOpenAI]:
    """The unmodified SDK, with the tenant's key."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        yield client
