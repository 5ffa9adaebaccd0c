"""Tests of how long a tenant's data is kept."""

import asyncio
from typing import Any

import pytest

from graftwork.api.rights.retention_routes import DataRetentionBody
from graftwork.platform.answers.data_rights import MIN_USAGE_DAYS, Retention
from tests.api.in_process_gateway import Gateway, TestTenant, chat
from tests.api.routes.test_erasure import roll_up

DAY_S = 86_400.0


async def keep(gateway: Gateway, tenant: TestTenant, **days: int | None) -> dict[str, Any]:
    answer = await gateway.admin.put(f"/v1/admin/tenants/{tenant.id}/retention", json=days)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def leave_some(tenant: TestTenant) -> dict[str, str]:
    """Leaves one object of each kind that has a retention. Returns the paths at which they are found."""
    upload = {"file": ("requests.jsonl", b"{}")}
    file = (await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()["id"]
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"})
    response = (await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "x"})).json()["id"]
    conversation = (await tenant.client.post("/v1/conversations", json={})).json()["id"]
    return {
        "file": f"/v1/files/{file}",
        "session": f"/v1/sessions/{session}",
        "response": f"/v1/responses/{response}",
        "conversation": f"/v1/conversations/{conversation}",
    }


async def found(tenant: TestTenant, paths: dict[str, str]) -> set[str]:
    return {name for name, path in paths.items() if (await tenant.client.get(path)).status_code == 200}


async def after_days(gateway: Gateway, days: float) -> int:
    """Lets days pass, and sweeps. Returns how much was deleted."""
    gateway.clock.advance(days * DAY_S)
    return await gateway.resources.rights.retention.sweep()


async def test_each_kind_of_data_is_deleted_after_its_days(gateway_on_either: Gateway) -> None:
    """A tenant's data is deleted after the days of its kind, not before, and that of a tenant without days stays."""
    gateway = gateway_on_either
    tenant, other = await gateway.tenant(), await gateway.tenant("Other")
    await keep(gateway, tenant, session_days=20, response_days=10, file_days=5, usage_days=MIN_USAGE_DAYS)
    mine, others = await leave_some(tenant), await leave_some(other)
    everything = set(mine)
    await roll_up(gateway)

    states = []
    for days in (4.9, 0.2, 4.8, 0.2, 9.8, 0.2):
        deleted = await after_days(gateway, days)
        states.append((deleted, everything - await found(tenant, mine)))
    usage_before, of_other_then = len(await tenant.usage()), await found(other, others)
    await after_days(gateway, MIN_USAGE_DAYS)

    assert states == [
        (0, set()),
        (1, {"file"}),
        (0, {"file"}),
        (2, {"file", "response", "conversation"}),
        (0, {"file", "response", "conversation"}),
        (1, everything),
    ]
    assert of_other_then == everything
    rows = (await gateway.admin.get(f"/v1/admin/usage?tenant_id={tenant.id}&from=0")).json()["data"]
    of_other = (await gateway.admin.get(f"/v1/admin/usage?tenant_id={other.id}&from=0")).json()["data"]
    assert (usage_before, rows, len(of_other)) == (1, [], 1)


async def test_what_was_deleted_is_in_the_audit_log(gateway: Gateway) -> None:
    """The audit log has who set which days, and how much was deleted of which kind; a sweep that deletes nothing has none."""
    tenant = await gateway.tenant()
    await keep(gateway, tenant, session_days=1, response_days=1, file_days=1)
    await leave_some(tenant)

    await after_days(gateway, 2)
    await after_days(gateway, 2)

    entries = (await gateway.admin.get("/v1/admin/audit")).json()["data"]
    told = [(one["action"], one["actor"], one["details"]) for one in reversed(entries) if "retention" in one["action"]]
    days = {"session_days": 1, "response_days": 1, "file_days": 1, "usage_days": None}
    assert told == [
        ("retention.set", "admin", days),
        ("retention.applied", "server", {"session": 1, "response": 2, "file": 1}),
    ]


async def test_a_session_in_use_is_kept(gateway: Gateway) -> None:
    """A session that changed lately stays, and so does one that runs a turn, however old it is."""
    tenant = await gateway.tenant()
    await keep(gateway, tenant, session_days=1)
    busy = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    gateway.engine.holds_after = 1
    running = asyncio.create_task(tenant.client.post(f"/v1/sessions/{busy}/turns", json={"input": "x"}))
    await gateway.engine.held.wait()

    deleted = await after_days(gateway, 2)
    gateway.engine.release.set()
    turn = await running
    again = await after_days(gateway, 0.5)

    assert (deleted, turn.json()["status"], again) == (0, "completed", 0)
    assert (await tenant.client.get(f"/v1/sessions/{busy}")).status_code == 200


async def test_a_fork_outlives_its_old_origin(gateway: Gateway) -> None:
    """When a session is deleted for its age, its fork that is in use has its whole history."""
    tenant = await gateway.tenant()
    await keep(gateway, tenant, session_days=1)
    old = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    await tenant.client.post(f"/v1/sessions/{old}/turns", json={"input": "First"})
    (fork,) = (await tenant.client.post(f"/v1/sessions/{old}/fork", json={})).json()["data"]
    gateway.clock.advance(0.9 * DAY_S)
    await tenant.client.post(f"/v1/sessions/{fork['id']}/turns", json={"input": "Second"})

    deleted = await after_days(gateway, 0.5)

    items = (await tenant.client.get(f"/v1/sessions/{fork['id']}/items")).json()["data"]
    assert (deleted, (await tenant.client.get(f"/v1/sessions/{old}")).status_code) == (1, 404)
    assert [item["content"][0]["text"] for item in items if item["role"] == "user"] == ["First", "Second"]


async def test_a_file_that_a_batch_reads_is_kept(gateway: Gateway) -> None:
    """A file is not deleted for its age while an open batch reads it."""
    tenant = await gateway.tenant()
    await keep(gateway, tenant, file_days=1)
    upload = {"file": ("requests.jsonl", b"{}")}
    file = (await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await tenant.client.post("/v1/batches", json=body)).status_code == 200

    assert await after_days(gateway, 2) == 0
    assert (await tenant.client.get(f"/v1/files/{file}")).status_code == 200


async def test_a_tenant_sees_its_retention(gateway: Gateway) -> None:
    """By default everything is kept for ever. A tenant sees what the operator has set, and cannot set it."""
    tenant = await gateway.tenant()
    before = (await tenant.client.get("/v1/retention")).json()

    await keep(gateway, tenant, session_days=7)
    after = (await tenant.client.get("/v1/retention")).json()

    kept_for_ever = dict.fromkeys(Retention.model_fields)
    assert before == kept_for_ever | {"object": "retention", "tenant_id": tenant.id}
    assert after == before | {"session_days": 7}
    own = await tenant.client.put(f"/v1/admin/tenants/{tenant.id}/retention", json={})
    assert own.status_code == 403


@pytest.mark.parametrize("body", [{"session_days": 0}, {"usage_days": MIN_USAGE_DAYS - 1}, {"file_days": 40_000}])
async def test_wrong_days_are_refused(gateway: Gateway, body: dict[str, int]) -> None:
    """Days out of their range are a 422 that names the field, and change nothing."""
    tenant = await gateway.tenant()

    answer = await gateway.admin.put(f"/v1/admin/tenants/{tenant.id}/retention", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, next(iter(body)))
    assert (await tenant.client.get("/v1/retention")).json()["session_days"] is None


async def test_an_unknown_tenant_is_a_404(gateway: Gateway) -> None:
    for method in ("GET", "PUT"):
        answer = await gateway.admin.request(method, "/v1/admin/tenants/ten_unknown/retention", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "tenant_not_found")


async def test_this_months_requests_are_billed_after_a_sweep(gateway: Gateway) -> None:
    """Usage rows within the kept days stay in the sums."""
    tenant = await gateway.tenant()
    await keep(gateway, tenant, usage_days=MIN_USAGE_DAYS)
    await tenant.client.post("/v1/chat/completions", json=chat())

    assert await after_days(gateway, MIN_USAGE_DAYS - 1) == 0
    (row,) = (await gateway.admin.get(f"/v1/admin/usage?tenant_id={tenant.id}&from=0")).json()["data"]
    assert row["requests"] == 1


def test_the_body_has_the_fields_of_a_retention() -> None:
    """The body that sets a retention, and the retention, have the same fields."""
    assert list(DataRetentionBody.model_fields) == list(Retention.model_fields)
