"""Tests of the erasure of a tenant whose KV files lie at an engine that was stopped when the tenant was deleted."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from graftwork.api.cli.chaos.fleet import ADMIN_KEY
from graftwork.api.cli.chaos.whole_fleet import FleetPlan, WholeFleet, whole_fleet
from graftwork.engine.kv.disk.file_format import DamagedFile, decode_header
from graftwork.engine.kv.transfer.plan import domain_digest
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import isolation_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_PEPPER = b"chaos"
_NAMES = ("goes", "stays")
_SESSIONS = 8
_LOOKS = 600
_LOOK_EVERY_S = 0.2


def domains_of(folder: Path) -> list[bytes]:
    """The domain of each KV file in a folder."""
    found = []
    for path in folder.rglob("*.kvpages"):
        try:
            found.append(decode_header(path.read_bytes()).domain)
        except (FileNotFoundError, DamagedFile):
            continue
    return found


def has_files(fleet: WholeFleet, engine: int, tenant_id: str) -> bool:
    domain = domain_digest(isolation_of(TenantId(tenant_id), _PEPPER))
    return domain in domains_of(fleet.kv_folders[engine])


async def until(looks: Sequence[object], what: str) -> None:
    """Waits until each of `looks`, functions without arguments, returns True."""
    for _ in range(_LOOKS):
        if all(look() for look in looks):  # type: ignore[operator]
            return
        await asyncio.sleep(_LOOK_EVERY_S)
    raise AssertionError(what)


async def talk(fleet: WholeFleet, key: str) -> None:
    """Runs some sessions at once, so that each engine keeps files of the tenant."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=fleet.urls[0], headers=headers, trust_env=False, timeout=60) as http:

        async def run(number: int) -> None:
            body = {"model": "graftwork-demo", "sampling": {"max_tokens": 64, "temperature": 0}}
            session = (await http.post("/v1/sessions", json=body)).raise_for_status().json()["id"]
            for turn in range(3):
                text = {"input": f"{number}.{turn}: all ships of the harbour, with their masts and their crews"}
                (await http.post(f"/v1/sessions/{session}/turns", json=text)).raise_for_status()

        await asyncio.gather(*map(run, range(_SESSIONS)))


async def erased(admin: httpx.AsyncClient, tenant_id: str) -> None:
    """Returns when the deleted tenant counts as erased."""
    for _ in range(_LOOKS):
        state = (await admin.get(f"/v1/admin/tenants/{tenant_id}/erasure")).raise_for_status().json()
        if state["status"] == "done":
            return
        await asyncio.sleep(_LOOK_EVERY_S)
    raise AssertionError(f"not erased: {state}")


def test_an_engine_that_was_stopped_forgets_who_was_deleted(tmp_path: Path) -> None:
    """A tenant is deleted and erased while an engine is off. When the engine comes back, its KV files of the tenant go,
    and those of another tenant stay.
    """

    async def run() -> None:
        plan = FleetPlan(engines=2, gateways=1, store="sqlite", shares_kv=False)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with (
            whole_fleet(tmp_path, plan) as fleet,
            httpx.AsyncClient(base_url=fleet.urls[0], headers=headers, trust_env=False, timeout=30) as admin,
        ):
            keys = [await fleet.tenant(name, 32) for name in _NAMES]
            made = (await admin.get("/v1/admin/tenants?limit=100")).json()["data"]
            tenants = {one["name"]: one["id"] for one in made if one["name"] in _NAMES}
            await asyncio.gather(*(talk(fleet, key) for key in keys))
            everywhere = [lambda e=e, t=t: has_files(fleet, e, t) for e in (0, 1) for t in tenants.values()]
            await until(everywhere, "an engine has no files of a tenant")
            away = fleet.engines[1]
            away.kill()

            (await admin.delete(f"/v1/admin/tenants/{tenants['goes']}")).raise_for_status()
            await erased(admin, tenants["goes"])
            assert [has_files(fleet, number, tenants["goes"]) for number in (0, 1)] == [False, True]
            away.start()
            await fleet.whole()
            await until([lambda: not has_files(fleet, 1, tenants["goes"])], "the engine keeps files of the tenant")

            assert all(has_files(fleet, number, tenants["stays"]) for number in (0, 1))

    asyncio.run(run())
