"""Tests of what all tenants of an organisation may keep together: sessions, adapters and their bytes."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.engine.core.requests import KvLimits
from graftwork.platform.quotas.quota import Quota
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, gateway_settings, open_gateway
from tests.api.routes.test_limits import organisation_of, put, refusal


async def open_session(tenant: TestTenant) -> httpx.Response:
    return await tenant.client.post("/v1/sessions", json={"model": "tiny"})


async def push(tenant: TestTenant, name: str, seed: int = 0) -> httpx.Response:
    return await tenant.client.post("/v1/adapters", data={"name": name}, files=adapter_upload(seed))


async def test_open_sessions_of_all_tenants_count(gateway: Gateway, tenant: TestTenant) -> None:
    """The sessions of all tenants of an organisation count, those that are closed and those of others do not."""
    other, stranger = await gateway.tenant("Other"), await gateway.tenant("Stranger")
    organisation = await organisation_of(gateway, tenant, other)
    await put(gateway, f"organisations/{organisation}/quota", max_sessions=3)
    first = (await open_session(tenant)).json()["id"]
    second = (await open_session(other)).json()["id"]

    too_many = await other.client.post(f"/v1/sessions/{second}/fork", json={"count": 2})
    third = await open_session(tenant)
    refused = await open_session(other)
    kept = await other.client.post("/v1/responses", json={"model": "tiny", "input": "x"})
    elsewhere = await open_session(stranger)
    await tenant.client.delete(f"/v1/sessions/{first}")
    again = await open_session(other)

    assert [answer.status_code for answer in (third, kept, elsewhere, again)] == [201, 200, 201, 201]
    for answer in (too_many, refused):
        assert refusal(answer) == (429, "organisation", "max_sessions")
        assert answer.json()["error"]["code"] == "max_sessions"


async def test_the_narrower_of_both_limits_holds(gateway: Gateway) -> None:
    """A tenant's own limit refuses where its organisation would not, and names the tenant."""
    tenant = await gateway.tenant(quota=Quota(max_sessions=1, max_adapters=1))
    organisation = await organisation_of(gateway, tenant)
    await put(gateway, f"organisations/{organisation}/quota", max_sessions=5, max_adapters=5)
    await open_session(tenant)
    await push(tenant, "one")

    refused = [await open_session(tenant), await push(tenant, "two", 1)]

    assert [refusal(answer) for answer in refused] == [(429, "tenant", "max_sessions"), (429, "tenant", "max_adapters")]


async def test_adapters_of_all_tenants_count(gateway: Gateway, tenant: TestTenant) -> None:
    """Adapters and their bytes count over all tenants; a version more is no adapter more, and an erased one is free."""
    other = await gateway.tenant("Other")
    organisation = await organisation_of(gateway, tenant, other)
    path, size = f"organisations/{organisation}/quota", len(weights_bytes(tensors()))
    await put(gateway, path, max_adapters=2, max_adapter_bytes=3 * size)
    made = [await push(tenant, "one"), await push(other, "two", 1), await push(tenant, "one", 2)]

    one_more = await push(other, "three", 3)
    await put(gateway, path, max_adapters=9, max_adapter_bytes=3 * size)
    too_large = await push(other, "two", 4)
    config, digest = config_bytes().decode(), "sha256:" + "0" * 64
    upload = {"name": "three", "config": config, "size_bytes": size, "digest": digest}
    begun = await other.client.post("/v1/adapter_uploads", json=upload)
    await tenant.client.delete("/v1/adapters/one?erase=true")
    again = await push(other, "two", 4)

    assert [answer.status_code for answer in (*made, again)] == [201] * 4
    assert refusal(one_more) == (429, "organisation", "max_adapters")
    assert one_more.json()["error"]["code"] == "max_adapters_exceeded"
    for answer in (too_large, begun):
        assert refusal(answer) == (429, "organisation", "max_adapter_bytes")
        assert answer.json()["error"]["code"] == "max_adapter_bytes_exceeded"


async def test_the_largest_rank_holds_for_all_tenants(gateway: Gateway, tenant: TestTenant) -> None:
    """An adapter of a rank above the organisation's is refused, and nothing of it is kept."""
    organisation = await organisation_of(gateway, tenant)
    await put(gateway, f"organisations/{organisation}/quota", max_adapter_rank=3)

    answer = await push(tenant, "one")

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "rank_limit_exceeded")
    assert "organisation" in answer.json()["error"]["message"]
    assert (await tenant.client.get("/v1/adapters")).json()["data"] == []


async def test_no_two_tenants_pass_a_limit_together(
    tmp_path: Path, tiny_model: Path, database_url: str, inspector: AdapterInspector
) -> None:
    """Of many sessions and adapters that two gateways make at once for three tenants, as many as may are made."""
    settings = [gateway_settings(tmp_path / name, tiny_model, database_url) for name in ("a", "b")]
    async with open_gateway(settings[0], inspector) as gateway, open_gateway(settings[1], inspector) as second:
        tenants = [await gateway.tenant(name) for name in ("one", "two", "three")]
        organisation = await organisation_of(gateway, *tenants)
        await put(gateway, f"organisations/{organisation}/quota", max_sessions=4, max_adapters=2)
        clients = [TestTenant(one.id, one.key, each.client(one.key)) for one in tenants for each in (gateway, second)]

        sessions = await asyncio.gather(*(open_session(client) for client in clients * 2))
        adapters = await asyncio.gather(*(push(client, f"a{index}", index) for index, client in enumerate(clients)))

    assert Counter(answer.status_code for answer in sessions) == {201: 4, 429: 8}
    assert Counter(answer.status_code for answer in adapters) == {201: 2, 429: 4}


async def test_engines_know_which_tenants_share_a_limit_of_kv(gateway: Gateway, tenant: TestTenant) -> None:
    """Requests and turns of an organisation's tenants bring one group with its limits, and a stranger's bring none."""
    other, stranger, alone = [await gateway.tenant(name) for name in ("Other", "Stranger", "Alone")]
    organisation = await organisation_of(gateway, tenant, other)
    await put(gateway, f"organisations/{organisation}/quota", max_device_kv_bytes=7, max_host_kv_bytes=0)
    await put(gateway, f"tenants/{other.id}/quota", max_host_kv_bytes=5)
    elsewhere = await organisation_of(gateway, stranger)
    await put(gateway, f"organisations/{elsewhere}/quota", max_host_kv_bytes=1)
    session = (await open_session(tenant)).json()["id"]

    for client in (tenant.client, other.client, stranger.client, alone.client):
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
    await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"})
    first, second, third, last, turn = (request.kv_limits for request in gateway.engine.requests)

    assert first.group is not None
    assert organisation not in first.group.decode("latin-1")
    assert first == turn == KvLimits(None, None, first.group, 7, 0)
    assert second == KvLimits(None, 5, first.group, 7, 0)
    assert third.group not in (None, first.group)
    assert (third.group_device_bytes, third.group_host_bytes) == (None, 1)
    assert last == KvLimits()


async def test_a_tenant_that_leaves_shares_no_limit_of_kv(gateway: Gateway, tenant: TestTenant) -> None:
    """The next request after the tenant has left, or after the limits are lifted, names no group."""
    organisation = await organisation_of(gateway, tenant)
    path, ask = f"organisations/{organisation}/quota", {"model": "tiny", "prompt": "x", "max_tokens": 1}
    await put(gateway, path, max_device_kv_bytes=7)
    await tenant.client.post("/v1/completions", json=ask)
    await put(gateway, path, max_sessions=1)
    await tenant.client.post("/v1/completions", json=ask)
    await put(gateway, path, max_device_kv_bytes=7)

    await gateway.admin.delete(f"/v1/admin/organisations/{organisation}/tenants/{tenant.id}")
    await tenant.client.post("/v1/completions", json=ask)

    assert [request.kv_limits.group is None for request in gateway.engine.requests] == [False, True, True]


async def test_what_counts_by_tenant_alone_is_refused(gateway: Gateway, tenant: TestTenant) -> None:
    """A limit that an organisation cannot have is a 422 that says where to set it."""
    organisation = await organisation_of(gateway, tenant)

    answer = await gateway.admin.put(f"/v1/admin/organisations/{organisation}/quota", json={"max_file_bytes": 1})

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "max_file_bytes")
    assert "set it for a tenant" in answer.json()["error"]["message"]
