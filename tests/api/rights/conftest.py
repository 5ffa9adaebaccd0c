"""A gateway on each database, which runs no batches."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway


@pytest.fixture
async def gateway_on_either(
    tmp_path: Path, tiny_model: Path, database_url: str, inspector: AdapterInspector
) -> AsyncIterator[Gateway]:
    """A gateway on SQLite, then on PostgreSQL."""
    settings = replace(gateway_settings(tmp_path, tiny_model, database_url), batch_concurrency=0)
    async with open_gateway(settings, inspector) as gateway:
        yield gateway


@pytest.fixture
async def gateway(
    tmp_path: Path, tiny_model: Path, sqlite_template: Path, inspector: AdapterInspector
) -> AsyncIterator[Gateway]:
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    settings = replace(gateway_settings(tmp_path, tiny_model), batch_concurrency=0)
    async with open_gateway(settings, inspector) as gateway:
        yield gateway
