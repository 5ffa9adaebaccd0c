"""Tests of the tenants of demo mode."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.api.deps.resources import AdminResources
from graftwork.api.server import demo_seed
from graftwork.api.server.demo_seed import DEMO_ADAPTERS, KEYS_FILE, seed_demo
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.in_process_gateway import Gateway, chat


@pytest.fixture
def shipped(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo folder whose adapters fit the fake engine's model."""
    folder = tmp_path_factory.mktemp("demo")
    for seed, name in enumerate(DEMO_ADAPTERS.values()):
        adapter = folder / "adapters" / name
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_bytes(config_bytes())
        (adapter / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(seed)))
    monkeypatch.setattr(demo_seed, "demo_folder", lambda: folder)
    return folder


def of_the_shipped_model(gateway: Gateway) -> AdminResources:
    admin = gateway.resources.admin
    return replace(admin, settings=replace(admin.settings, model=None, demo=True))


@pytest.mark.usefixtures("shipped")
async def test_first_start(gateway: Gateway) -> None:
    """The first start makes three tenants with an adapter and a working key each, in a file that only its owner can
    read."""
    tenants = await seed_demo(of_the_shipped_model(gateway))

    assert [(tenant.name, tenant.adapter) for tenant in tenants] == list(DEMO_ADAPTERS.items())
    for tenant in tenants:
        answer = await gateway.client(tenant.key).post("/v1/chat/completions", json=chat() | {"model": tenant.adapter})
        assert answer.status_code == 200
    path = gateway.resources.server.settings.data_dir / KEYS_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {tenant.name: tenant.key for tenant in tenants}


@pytest.mark.usefixtures("shipped")
async def test_second_start(gateway: Gateway) -> None:
    """A second start keeps the same tenants, keys and versions."""
    first = await seed_demo(of_the_shipped_model(gateway))
    second = await seed_demo(of_the_shipped_model(gateway))

    assert second == first
    assert len((await gateway.admin.get("/v1/admin/tenants")).json()["data"]) == 3
    adapter = (await gateway.client(first[0].key).get("/v1/adapters/pirate")).json()
    assert [version["version"] for version in adapter["versions"]] == [1]


@pytest.mark.usefixtures("shipped")
async def test_lost_database(gateway: Gateway) -> None:
    """A key whose tenant is gone is replaced."""
    first = await seed_demo(of_the_shipped_model(gateway))
    for tenant in (await gateway.admin.get("/v1/admin/tenants")).json()["data"]:
        await gateway.admin.delete(f"/v1/admin/tenants/{tenant['id']}")

    second = await seed_demo(of_the_shipped_model(gateway))

    assert all(old.key != new.key for old, new in zip(first, second, strict=True))


async def test_other_model(gateway: Gateway) -> None:
    """With another model, whose shapes the shipped adapters do not fit, the tenants have no adapter."""
    tenants = await seed_demo(gateway.resources.admin)

    assert [tenant.adapter for tenant in tenants] == [None, None, None]
