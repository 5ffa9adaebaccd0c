"""Tests of two gateways on one database: what one changes about keys, the other follows by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway
from tests.api.signed_in import role_in, sign_in_person, signed_in

WITHIN_S = 60


@pytest.fixture
async def two(
    tmp_path: Path, tiny_model: Path, database_url: str, inspector: AdapterInspector
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    folders = [tmp_path / name for name in ("first", "second")]
    settings = [gateway_settings(folder, tiny_model, database_url) for folder in folders]
    async with open_gateway(settings[0], inspector) as first, open_gateway(settings[1], inspector) as second:
        yield first, second


async def once_refused(client: httpx.AsyncClient) -> httpx.Response:
    """The first answer that is a refusal."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            answer = await client.get("/v1/models")
            if answer.status_code != 200:
                return answer
            await asyncio.sleep(0)


@pytest.mark.parametrize("act", ["revoke", "rotate", "suspend"])
async def test_a_key_that_ends_at_one_gateway_ends_at_the_other(two: tuple[Gateway, Gateway], act: str) -> None:
    """A key and a cookie that both gateways know are refused by the first at once, and by the second without a hand."""
    first, second = two
    tenant = await first.tenant()
    neighbour = await first.tenant("Neighbour")
    tenancy = first.resources.account.tenancy
    (key,) = (await tenancy.list_keys(tenant.id)).items
    async with signed_in(second, tenant.key) as browser:
        clients = [second.client(tenant.key), browser]
        for client in (tenant.client, *clients):
            assert (await client.get("/v1/models")).status_code == 200

        if act == "suspend":
            await tenancy.suspend_tenant(tenant.id)
        elif act == "rotate":
            await tenancy.rotate_key(tenant.id, key.id)
        else:
            await tenancy.revoke_key(tenant.id, key.id)

        status = 403 if act == "suspend" else 401
        assert (await tenant.client.get("/v1/models")).status_code == status
        for client in clients:
            assert (await once_refused(client)).status_code == status
    assert (await second.client(neighbour.key).get("/v1/models")).status_code == 200


async def test_last_use_is_stored_when_a_gateway_ends(two: tuple[Gateway, Gateway]) -> None:
    """A use that is not stored yet is stored when asked, and shown by the other gateway."""
    first, second = two
    tenant = await first.tenant()
    await second.client(tenant.key).get("/v1/models")
    path = f"/v1/admin/tenants/{tenant.id}/keys"

    await second.resources.account.tenancy.uses.flush()

    (shown,) = (await first.admin.get(path)).json()["data"]
    assert shown["last_used_at"] == second.clock.now()


async def test_a_suspended_person_is_out_at_the_other_gateway(two: tuple[Gateway, Gateway]) -> None:
    """Sessions of a person, in a tenant and as an operator, end at a gateway that was not told, and other people's go on."""
    first, second = two
    tenant = await first.tenant()
    async with AsyncExitStack() as stack:
        member, operator, other = [await stack.enter_async_context(second.client("")) for _ in range(3)]
        person = await sign_in_person(second, member, role_in(tenant.id))
        boss = await sign_in_person(second, operator, "operator")
        await sign_in_person(second, other, role_in(tenant.id))
        for client, path in ((member, "/v1/models"), (operator, "/v1/admin/tenants"), (other, "/v1/models")):
            assert (await client.get(path)).status_code == 200

        for one in (person, boss):
            await first.resources.people.people.suspend(one.id)

        assert (await once_refused(member)).status_code == 401
        assert (await operator.get("/v1/admin/tenants")).status_code == 401
        assert (await other.get("/v1/models")).status_code == 200
