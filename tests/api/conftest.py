"""A gateway for each test, with one tenant in it."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from tests.adapters.shared_inspector import shared_inspector
from tests.api.in_process_gateway import Gateway, TestTenant, gateway_settings, open_gateway, write_model_folder


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
