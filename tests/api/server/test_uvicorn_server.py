"""Tests of the HTTP server's own loop."""

import asyncio

import httpx
import pytest

from graftwork.api.server import uvicorn_server
from tests.api.gateway_on_port import running_server
from tests.api.in_process_gateway import Gateway


async def test_a_stop_waits_for_no_tick(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped server ends at once, however far the next tick of its loop is."""
    monkeypatch.setattr(uvicorn_server, "TICK_S", 3600.0)

    async with asyncio.timeout(30), running_server(gateway) as (server, _):
        serving = server.started

    assert serving
    assert server.should_exit


async def test_answers_have_the_date(gateway: Gateway) -> None:
    """The server dates its answers, also the first one."""
    async with running_server(gateway) as (_, url), httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{url}/healthz")

    assert answer.headers["date"].endswith("GMT")
