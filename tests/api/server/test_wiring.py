"""Tests of a gateway's start and end."""

import asyncio
import socket
import stat
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from sqlalchemy import String

from graftwork.api.server.app import create_app
from graftwork.platform.errors import GraftworkError, InvalidRequest, Unavailable
from graftwork.platform.gateways.lease import owner_name
from graftwork.platform.settings.settings import Settings
from graftwork.sessions.core.session import TurnStatus
from graftwork.sessions.store.tables import SessionRow
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import chat, gateway_settings, open_gateway


async def test_application_opens_its_own(tmp_path: Path, tiny_model: Path) -> None:
    """An application without resources makes its schema, pepper and admin key at its start."""
    app = create_app(Settings(data_dir=tmp_path / "new", model=tiny_model), engine=FakeEngine())

    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
        ready = await client.get("http://gateway.test/readyz")
        key = (tmp_path / "new" / "admin.key").read_text().strip()
        tenants = await client.get("http://gateway.test/v1/admin/tenants", headers={"x-api-key": key})

    assert (ready.status_code, tenants.status_code) == (200, 200)
    assert stat.S_IMODE((tmp_path / "new" / "admin.key").stat().st_mode) == 0o600


async def test_restart(tmp_path: Path, tiny_model: Path, database_url: str) -> None:
    """A restarted gateway has its tenants, adapters and sessions, on every database."""
    settings = gateway_settings(tmp_path, tiny_model, database_url)
    async with open_gateway(settings) as gateway:
        tenant = await gateway.tenant()
        await tenant.push_adapter()
        session = (await tenant.client.post("/v1/sessions", json={"model": "pirate"})).json()["id"]
        await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "One"})
    async with open_gateway(settings) as gateway:
        client = gateway.client(tenant.key)
        turn = await client.post(f"/v1/sessions/{session}/turns", json={"input": "Two"})
        items = (await client.get(f"/v1/sessions/{session}/items")).json()["data"]
        answer = await client.post("/v1/chat/completions", json=chat() | {"model": "pirate@1"})

    assert turn.json()["status"] == "completed"
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant"]
    assert answer.status_code == 200


async def test_interrupted_turn(tmp_path: Path, tiny_model: Path, database_url: str) -> None:
    """A gateway that stops during a turn stores the failure in the turn's events, and the session can continue."""
    settings = gateway_settings(tmp_path, tiny_model, database_url)
    async with open_gateway(settings) as gateway:
        tenant = await gateway.tenant()
        session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
        gateway.engine.holds_after = 2
        principal = await gateway.resources.account.tenancy.authenticate(tenant.key)
        await gateway.resources.sessions.sessions.start_turn(principal, session, "One")
        await gateway.engine.held.wait()
    async with open_gateway(settings) as gateway:
        client = gateway.client(tenant.key)
        events = (await client.get(f"/v1/sessions/{session}/events")).text
        turn = await client.post(f"/v1/sessions/{session}/turns", json={"input": "Two"})

    assert events.count("event: turn.failed") == 1
    assert turn.json()["status"] == "completed"


async def test_sweeps_go_on_while_the_gateway_runs(tmp_path: Path, tiny_model: Path) -> None:
    """The sweeps begin with the gateway and end with it."""

    def sweeps() -> list[str]:
        return sorted(name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("the sweep of"))

    async with open_gateway(gateway_settings(tmp_path, tiny_model)):
        during = sweeps()

    kinds = ("adapters", "tenants")
    rows = (
        "batches",
        "engine reports",
        "exports",
        "files",
        "idempotency keys",
        "old alerts",
        "old data",
        "old engine reports",
        "old events",
        "old months",
        "old usage",
        "responses",
        "sessions",
        "uploads",
        "usage journals",
        "used sign-ins",
        "usage sums",
    )
    names = (*(f"deleted {kind}" for kind in kinds), *rows)
    assert during == sorted(f"the sweep of {name}" for name in names)
    assert sweeps() == []


async def test_gateways_that_share_a_data_folder(
    tmp_path: Path, tiny_model: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that starts on another machine, over the same data folder, leaves the first one's turns alone."""
    settings = gateway_settings(tmp_path, tiny_model, database_url)
    async with open_gateway(settings) as first:
        tenant = await first.tenant()
        session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
        first.engine.holds_after = 2
        principal = await first.resources.account.tenancy.authenticate(tenant.key)
        running = await first.resources.sessions.sessions.start_turn(principal, session, "One")
        await first.engine.held.wait()
        monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
        async with open_gateway(settings) as second:
            seen = (await second.client(tenant.key).get(f"/v1/sessions/{session}")).json()
            first.engine.release.set()
            turn = await running.result()

    assert seen["status"] == "running"
    assert turn.status is TurnStatus.COMPLETED


def test_names_of_gateways(tmp_path: Path, tiny_model: Path) -> None:
    """A gateway's name stays over restarts, fits its column and differs by port; without a fixed port there is none."""
    settings = gateway_settings(tmp_path, tiny_model)
    column = SessionRow.__table__.c.lease_owner.type
    assert isinstance(column, String)
    assert column.length

    name = owner_name(settings.host, settings.port)

    assert name is not None
    assert name == owner_name(settings.host, settings.port)
    assert len(name) <= column.length
    assert name != owner_name(settings.host, 8001)
    assert owner_name(settings.host, 0) is None


@pytest.mark.parametrize(
    ("redis_url", "error", "told"),
    [
        ("redis://127.0.0.1:1", Unavailable, "start it, correct --redis-url"),
        ("foo", InvalidRequest, "redis://HOST:PORT/NUMBER"),
    ],
)
async def test_a_redis_that_cannot_be_used_ends_the_start(
    tmp_path: Path, tiny_model: Path, redis_url: str, error: type[GraftworkError], told: str
) -> None:
    """A gateway does not wait for its first request to find out that its limits cannot be shared."""
    settings = replace(gateway_settings(tmp_path, tiny_model), redis_url=redis_url)

    with pytest.raises(error) as caught:
        async with open_gateway(settings):
            pass

    assert told in caught.value.message
