"""Tests of an engine that is far away: each byte of it takes a while."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.server import EngineServer
from graftwork.platform.clock import ManualClock
from tests.engine.conftest import RandomModels
from tests.engine.tagged_kv_cache import load_always

LATENCY_S = 0.4
"""From an engine to a gateway. A handshake with TLS around the world, or a machine without a free core, takes as long."""


@pytest.fixture
async def far_address(models: RandomModels, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a served engine behind a slow link."""
    near = f"{tmp_path}/engine.sock"
    config = EngineConfig(model=models.base, dtype="float32", page_tokens=4, device_bytes=4 * 2**20)
    engine = build_engine(config, lambda _: models.source, ManualClock(), costs=load_always())
    server = EngineServer(engine, f"unix:{near}")
    await server.start()
    links: set[asyncio.Task[None] | None] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.add(asyncio.current_task())
        from_engine, to_engine = await asyncio.open_unix_connection(near)
        await asyncio.gather(_pass(from_engine, writer, LATENCY_S), _pass(reader, to_engine, 0.0))

    link = await asyncio.start_unix_server(carry, f"{tmp_path}/link.sock")
    yield f"unix:{tmp_path}/link.sock"
    link.close()
    await asyncio.gather(*(one for one in links if one is not None), return_exceptions=True)
    await server.stop()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, latency_s: float) -> None:
    """Passes bytes on, each part after the latency, until the reader ends."""
    with suppress(ConnectionError):
        while piece := await reader.read(65536):
            await asyncio.sleep(latency_s)
            writer.write(piece)
    writer.close()


async def test_an_engine_that_answers_late_is_reached_at_the_first_try(far_address: str) -> None:
    """A connection whose handshake takes 0.4 s is no engine that is absent."""
    client = GrpcEngineClient(far_address)
    try:
        description = await client.describe()
    finally:
        await client.close()

    assert description.page_tokens == 4
