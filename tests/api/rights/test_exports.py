"""Tests of exports over HTTP: that nothing of a tenant is missing in them, and nothing of others is in them."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from graftwork.platform.database import Database
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway
from tests.api.routes.test_erasure import use_everything

EXPORTS = "/v1/exports"


@pytest.fixture
async def gateway(tmp_path: Path, tiny_model: Path, database_url: str) -> AsyncIterator[Gateway]:
    """A gateway on SQLite, then on PostgreSQL, that runs no batches."""
    settings = replace(gateway_settings(tmp_path / "data", tiny_model, database_url), batch_concurrency=0)
    async with open_gateway(settings) as opened:
        yield opened


async def ended(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Waits until an export has ended, and returns it."""
    while True:
        export: dict[str, Any] = (await client.get(path)).json()
        if export["status"] in ("completed", "failed"):
            return export
        await asyncio.sleep(0)


async def exported(client: httpx.AsyncClient, path: str = EXPORTS) -> tuple[dict[str, Any], zipfile.ZipFile]:
    """Makes an export, and returns it with its archive."""
    created = await client.post(path)
    assert created.status_code == 202, created.text
    export = await ended(client, f"{path}/{created.json()['id']}")
    content = await client.get(f"{path}/{export['id']}/content")
    assert content.status_code == 200, content.text
    assert hashlib.sha256(content.content).hexdigest() == export["sha256"]
    assert len(content.content) == export["bytes"]
    return export, zipfile.ZipFile(io.BytesIO(content.content))


def table(archive: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(f"tables/{name}.jsonl").splitlines()]


async def stored(database: Database, name: str, where: str, tenant_id: str) -> list[dict[str, Any]]:
    async with database.read() as session:
        found = await session.execute(text(f"SELECT * FROM {name} WHERE {where}"), {"tenant": tenant_id})
        return [dict(row) for row in found.mappings()]


async def test_smoke(gateway: Gateway) -> None:
    tenant = await gateway.tenant()
    await use_everything(gateway, tenant)
    export, archive = await exported(tenant.client)
    print(export, archive.namelist())
    print(archive.read("manifest.json").decode())
    print(table(archive, "sessions/checkpoints")[:2])
    raise AssertionError
