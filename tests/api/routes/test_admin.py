"""Tests of the operator's routes: tenants, keys, quotas, usage, audit and replicas."""

from typing import Any

import pytest

from graftwork.platform.errors import Unavailable
from graftwork.platform.tenancy.erasure import SETTLE_S
from tests.api.in_process_gateway import Gateway, TestTenant, chat

TENANTS = "/v1/admin/tenants"


async def test_tenant_life(gateway: Gateway) -> None:
    """A tenant is created, read, changed, suspended, resumed and deleted."""
    admin = gateway.admin

    made = await admin.post(TENANTS, json={"name": "Acme", "weight": 2})
    path = f"{TENANTS}/{made.json()['id']}"
    changed = await admin.patch(path, json={"service_tier_ceiling": "priority"})
    suspended = await admin.post(f"{path}/suspend")
    resumed = await admin.post(f"{path}/resume")
    listed = await admin.get(TENANTS)
    deleted = await admin.delete(path)

    assert (made.status_code, made.json()["weight"], made.json()["service_tier_ceiling"]) == (201, 2.0, "default")
    assert (changed.json()["name"], changed.json()["service_tier_ceiling"]) == ("Acme", "priority")
    assert (suspended.json()["status"], resumed.json()["status"]) == ("suspended", "active")
    assert [tenant["id"] for tenant in listed.json()["data"]] == [made.json()["id"]]
    assert deleted.json() == {"id": made.json()["id"], "object": "tenant.deleted", "deleted": True}
    assert (await admin.get(path)).status_code == 404


async def test_key_life(gateway: Gateway, tenant: TestTenant) -> None:
    """A key is shown once, works until it is rotated or revoked, and is listed without its secret."""
    admin, path = gateway.admin, f"{TENANTS}/{tenant.id}/keys"

    made = (await admin.post(path, json={"name": "ci", "scopes": ["inference"]})).json()
    rotated = (await admin.post(f"{path}/{made['id']}/rotate")).json()
    old = await gateway.client(made["key"]).get("/v1/models")
    new = await gateway.client(rotated["key"]).get("/v1/models")
    revoked = await admin.delete(f"{path}/{rotated['id']}")
    gone = await gateway.client(rotated["key"]).get("/v1/models")
    listed = await admin.get(path)

    assert made["key"].startswith("gw_")
    assert (old.status_code, new.status_code, gone.status_code) == (401, 200, 401)
    assert revoked.json()["revoked_at"] is not None
    assert all("key" not in key for key in listed.json()["data"])
    assert made["key"] not in listed.text


async def test_expiry(gateway: Gateway, tenant: TestTenant) -> None:
    """A key may expire, at unix seconds or at an ISO 8601 time; then it is a 401 that says so."""
    path = f"{TENANTS}/{tenant.id}/keys"
    for expires_at in (1_700_000_050, "2023-11-14T22:14:10Z", "2023-11-14T23:14:10+01:00"):
        key = (await gateway.admin.post(path, json={"name": "k", "expires_at": expires_at})).json()

        assert key["expires_at"] == 1_700_000_050.0
    gateway.clock.advance(51)
    answer = await gateway.client(key["key"]).get("/v1/models")

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "expired_api_key")


async def test_scopes(gateway: Gateway, tenant: TestTenant) -> None:
    """A key does what its scopes say, and reads models without any."""
    key = (await gateway.admin.post(f"{TENANTS}/{tenant.id}/keys", json={"name": "k", "scopes": ["usage"]})).json()
    client = gateway.client(key["key"])

    assert (await client.get("/v1/usage")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200
    for answer in (await client.post("/v1/chat/completions", json=chat()), await client.delete("/v1/adapters/a")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")


async def test_quota(gateway: Gateway, tenant: TestTenant) -> None:
    """A quota is replaced as a whole, applies at once, and its tenant can read it."""
    path = f"{TENANTS}/{tenant.id}/quota"

    put = await gateway.admin.put(path, json={"requests_per_minute": 1, "max_sessions": None})
    first = await tenant.client.post("/v1/chat/completions", json=chat())
    second = await tenant.client.post("/v1/chat/completions", json=chat())

    assert put.json()["requests_per_minute"] == 1
    found, own = (await gateway.admin.get(path)).json(), (await tenant.client.get("/v1/quota")).json()
    assert found == own == put.json() | {"used": own["used"]}
    assert (first.status_code, second.status_code) == (200, 429)


async def test_bad_bodies(gateway: Gateway, tenant: TestTenant) -> None:
    """A bad body is a 422 that names the field; unknown fields are bad."""
    keys, quota = f"{TENANTS}/{tenant.id}/keys", f"{TENANTS}/{tenant.id}/quota"
    bad: list[tuple[str, str, Any, str | None]] = [
        ("POST", TENANTS, {}, "name"),
        ("POST", TENANTS, {"name": ""}, "name"),
        ("POST", TENANTS, {"name": 7}, "name"),
        ("POST", TENANTS, {"name": "x", "weight": 0}, "weight"),
        ("POST", TENANTS, {"name": "x", "weight": "heavy"}, "weight"),
        ("POST", TENANTS, {"name": "x", "service_tier_ceiling": "gold"}, "service_tier_ceiling"),
        ("POST", TENANTS, {"name": "x", "plan": "gold"}, "plan"),
        ("POST", TENANTS, [], None),
        ("PATCH", f"{TENANTS}/{tenant.id}", {"nickname": "x"}, "nickname"),
        ("POST", keys, {"name": "x", "scopes": ["everything"]}, "scopes"),
        ("POST", keys, {"name": "x", "expires_at": "tomorrow"}, "expires_at"),
        ("PUT", quota, {"requests_per_hour": 1}, "requests_per_hour"),
        ("PUT", quota, {"requests_per_minute": -1}, "requests_per_minute"),
        ("PUT", quota, {"requests_per_minute": 1.5}, "requests_per_minute"),
        ("PUT", quota, [1], None),
    ]
    for method, route, body, param in bad:
        answer = await gateway.admin.request(method, route, json=body)

        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), (route, body, answer.text)


async def test_usage(gateway: Gateway, tenant: TestTenant) -> None:
    """The operator sees all tenants' usage, or one's, in a span of time; the base model goes by its name."""
    await tenant.client.post("/v1/chat/completions", json=chat())
    usage = "/v1/admin/usage"

    everyone = (await gateway.admin.get(usage)).json()["data"]
    nobody = (await gateway.admin.get(f"{usage}?tenant_id=ten_0")).json()["data"]
    before = (await gateway.admin.get(f"{usage}?to=2023-11-14T00:00:00Z")).json()["data"]
    inside = (await gateway.admin.get(f"{usage}?from=1699999999&to=1700000001&group_by=day")).json()["data"]

    assert [row["group"] for row in everyone] == [tenant.id]
    assert (nobody, before) == ([], [])
    assert [row["group"] for row in inside] == ["2023-11-14"]
    for reader in (gateway.admin.get(f"{usage}?group_by=adapter"), tenant.client.get("/v1/usage?group_by=adapter")):
        assert [row["group"] for row in (await reader).json()["data"]] == ["tiny"]
    for bad in ("from=yesterday", "from=2&to=1", "group_by=colour", "from=1e400", "to=nan"):
        assert (await gateway.admin.get(f"{usage}?{bad}")).status_code == 422, bad


async def test_audit(gateway: Gateway) -> None:
    """The audit log lists the operator's actions, newest first, without secrets."""
    made = (await gateway.admin.post(TENANTS, json={"name": "Acme"})).json()
    key = (await gateway.admin.post(f"{TENANTS}/{made['id']}/keys", json={"name": "k"})).json()

    entries = await gateway.admin.get("/v1/admin/audit?limit=2")

    assert [entry["action"] for entry in entries.json()["data"]] == ["key.created", "tenant.created"]
    assert key["key"].split("_")[2] not in entries.text


async def test_replicas(gateway: Gateway) -> None:
    """The list of engines shows how busy each is."""
    replica = (await gateway.admin.get("/v1/admin/replicas")).json()["data"][0]

    assert (replica["status"], replica["running_requests"], replica["waiting_requests"]) == ("ready", 1, 2)
    assert (await gateway.admin.post(f"/v1/admin/replicas/{replica['id']}/drain")).status_code == 409
    assert (await gateway.admin.post("/v1/admin/replicas/other/drain")).status_code == 404


async def test_deleted_tenant(gateway: Gateway, tenant: TestTenant) -> None:
    """Deleting a tenant ends its keys and deletes its adapters and KV; its usage stays."""
    await tenant.push_adapter()
    await tenant.client.post("/v1/chat/completions", json=chat())

    await gateway.admin.delete(f"{TENANTS}/{tenant.id}")
    await gateway.resources.admin.erasure.sweep()

    assert (await tenant.client.get("/v1/models")).status_code == 401
    assert len(gateway.engine.forgotten) == 1
    assert set(gateway.engine.forgotten_domains) == {gateway.engine.requests[0].domain}
    rows = (await gateway.admin.get(f"/v1/admin/usage?tenant_id={tenant.id}")).json()["data"]
    assert rows[0]["requests"] == 1


async def test_deleted_tenant_without_an_engine(
    gateway: Gateway, tenant: TestTenant, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenant can be deleted while no engine answers; the log says that its KV remains, and it is not yet erased."""
    gateway.engine.absence = Unavailable("No engine answers at present.", retry_after_s=1.0)

    deleted = await gateway.admin.delete(f"{TENANTS}/{tenant.id}")
    gateway.clock.advance(SETTLE_S)
    await gateway.resources.admin.erasure.sweep()

    assert deleted.json()["deleted"] is True
    assert (await tenant.client.get("/v1/models")).status_code == 401
    assert {record.message for record in caplog.records if record.message.startswith("tenant_")} == {
        "tenant_not_erased"
    }
    assert (await gateway.admin.get(f"{TENANTS}/{tenant.id}/erasure")).json()["status"] == "running"
