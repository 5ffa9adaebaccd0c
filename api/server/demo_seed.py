"""Creates the three tenants of demo mode. Each tenant has an adapter, and a key that stays the same after a restart.

Owns the file `<data_dir>/demo-keys.json` (mode 0600), which has the keys as plain text. Only demo mode, which has no
secrets, may store keys in this way.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import CONFIG_NAME, WEIGHTS_NAME
from graftwork.api.deps.resources import AdminResources
from graftwork.api.server.served_model import demo_folder
from graftwork.platform.errors import NotAuthenticated, NotPermitted
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import Principal

KEYS_FILE = "demo-keys.json"
DEMO_ADAPTERS = {"Blackbeard Charters": "pirate", "Corner Helpdesk": "helpdesk", "Plain Labs": "terse"}
"""Maps the name of each demo tenant to the name of its adapter."""


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """A demo tenant: its name, its key, and the adapter that its requests can send as `model`."""

    name: str
    adapter: str | None
    """The name to send as `model`. It is None if the adapter does not fit the served model."""
    key: str


async def seed_demo(resources: AdminResources) -> tuple[DemoTenant, ...]:
    """Creates the demo's tenants, keys and adapters that do not exist yet. Returns all demo tenants."""
    path = resources.settings.data_dir / KEYS_FILE
    keys = await asyncio.to_thread(_read_keys, path)
    tenants = [await _seed_tenant(resources, name, keys.get(name)) for name in DEMO_ADAPTERS]
    await asyncio.to_thread(_write_keys, path, {tenant.name: tenant.key for tenant in tenants})
    return tuple(tenants)


async def _seed_tenant(resources: AdminResources, name: str, known_key: str | None) -> DemoTenant:
    key = known_key or ""
    principal = await _holder(resources, key)
    if principal is None:
        key = await _make_tenant(resources, name)
        principal = await resources.tenancy.authenticate(key)
    return DemoTenant(name, await _push_adapter(resources, principal, DEMO_ADAPTERS[name]), key)


async def _holder(resources: AdminResources, key: str) -> Principal | None:
    """Returns the principal of a key. Returns None if the key is not valid in this database."""
    try:
        return await resources.tenancy.authenticate(key)
    except (NotAuthenticated, NotPermitted):
        return None


async def _make_tenant(resources: AdminResources, name: str) -> str:
    tenant = await resources.tenancy.create_tenant(name, actor="demo")
    _, plaintext = await resources.tenancy.create_key(tenant.id, "demo", actor="demo")
    return plaintext


async def _push_adapter(resources: AdminResources, principal: Principal, adapter: str) -> str | None:
    """Publishes a demo adapter for the tenant. Publishing the same bytes again changes nothing.

    Returns the adapter's name, or None if the demo does not serve its own model or lacks this adapter.
    """
    folder = demo_folder() / "adapters" / adapter
    if not await asyncio.to_thread(folder.is_dir) or resources.settings.model is not None:
        return None
    description = await resources.engine.describe()
    with (folder / CONFIG_NAME).open("rb") as config, (folder / WEIGHTS_NAME).open("rb") as weights:
        files = AdapterFiles.read(config, weights)
        await resources.registry.publish(principal.scope(), adapter, files, description, Quota())
    return adapter


def _read_keys(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    keys: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return keys


def _write_keys(path: Path, keys: dict[str, str]) -> None:
    """Writes the keys file completely or not at all. Other users can never read the file."""
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(keys, file, indent=2)
    draft.replace(path)
