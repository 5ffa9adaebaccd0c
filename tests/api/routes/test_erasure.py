"""Tests that a tenant's running work ends with its access, and that nothing of a deleted tenant is left."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import inspect, text

from graftwork.platform.alerts.budget_alerts import BudgetAlerts
from graftwork.platform.alerts.sender import AlertSender
from graftwork.platform.batches.batch import LineOutcome
from graftwork.platform.batches.claims import BatchClaims
from graftwork.platform.database import Base, Database
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.errors import Unavailable
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.upkeep.rollups import UsageRollups
from graftwork.platform.tenancy.erasure import SETTLE_S
from graftwork.sessions.service import NewSession
from graftwork.sessions.store.deletion_rows import find_of_tenant
from tests.api import in_process_gateway
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat, gateway_settings, open_gateway

TENANTS = "/v1/admin/tenants"
SECRET = "the tenant's own words"
KEPT = {"tenants", "usage_events", "usage_sums", "usage_unrolled", "audit_entries", "price_lists"}
"""The tables in which a deleted tenant may have rows."""


@pytest.fixture
async def gateway(tmp_path: Path, tiny_model: Path, database_url: str) -> AsyncIterator[Gateway]:
    """A gateway on SQLite, then on PostgreSQL, which encrypts files."""
    master_keys = tmp_path / "master.key"
    MasterKeyFile.create(master_keys)
    settings = gateway_settings(tmp_path / "data", tiny_model, database_url)
    settings = replace(settings, batch_concurrency=0, master_key_file=master_keys)
    async with open_gateway(settings) as opened:
        yield opened


async def end_access(gateway: Gateway, tenant: TestTenant, how: str) -> None:
    path = f"{TENANTS}/{tenant.id}"
    if how == "suspend":
        answer = await gateway.admin.post(f"{path}/suspend")
    elif how == "revoke":
        (key,) = (await gateway.admin.get(f"{path}/keys")).json()["data"]
        answer = await gateway.admin.delete(f"{path}/keys/{key['id']}")
    else:
        answer = await gateway.admin.delete(path)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("how", ["suspend", "revoke", "delete"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_ends_with_its_access(gateway: Gateway, how: str, stream: bool) -> None:
    """A running chat is cancelled at once: its client gets a typed error, and what was generated is billed."""
    tenant, other = await gateway.tenant(), await gateway.tenant("Other")
    gateway.engine.holds_after = 2
    running = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=chat(stream=stream)))
    await gateway.engine.held.wait()

    await end_access(gateway, tenant, how)
    answer = await running

    assert answer.status_code == (200 if stream else 403)
    assert "access_ended" in answer.text
    assert gateway.engine.cancelled == [gateway.engine.requests[0].request_id]
    assert (await tenant.client.get("/v1/models")).status_code == (403 if how == "suspend" else 401)
    (usage,) = (await gateway.admin.get(f"/v1/admin/usage?tenant_id={tenant.id}")).json()["data"]
    assert usage["completion_tokens"] == 2
    gateway.engine.holds_after = None
    assert (await other.client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_another_key_of_the_tenant_goes_on(gateway: Gateway) -> None:
    """Revoking a key cancels nothing that another key of the tenant has started."""
    tenant = await gateway.tenant()
    (first,) = (await gateway.admin.get(f"{TENANTS}/{tenant.id}/keys")).json()["data"]
    second = (await gateway.admin.post(f"{TENANTS}/{tenant.id}/keys", json={"name": "second"})).json()
    gateway.engine.holds_after = 2
    running = asyncio.create_task(gateway.client(second["key"]).post("/v1/chat/completions", json=chat()))
    await gateway.engine.held.wait()

    await gateway.admin.delete(f"{TENANTS}/{tenant.id}/keys/{first['id']}")
    gateway.engine.release.set()

    assert (await running).status_code == 200


@pytest.mark.parametrize("how", ["suspend", "revoke", "delete"])
async def test_a_turn_ends_with_its_access_on_another_gateway(
    gateway: Gateway,
    tmp_path: Path,
    tiny_model: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """A gateway cancels the turns of a tenant or key that has lost its access by a change on another gateway."""
    tenant = await gateway.tenant()
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    gateway.engine.holds_after = 2
    running = asyncio.create_task(tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": SECRET}))
    await gateway.engine.held.wait()

    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    settings = gateway_settings(tmp_path / "other", tiny_model, database_url)
    async with open_gateway(replace(settings, master_key_file=tmp_path / "master.key")) as other:
        await end_access(other, tenant, how)
        answer = await running

    assert how == "delete" or answer.json()["status"] == "cancelled"
    assert gateway.engine.cancelled == [gateway.engine.requests[0].request_id]


@pytest.mark.parametrize("reads", ["session", "response"])
async def test_a_reader_ends_with_its_access(gateway: Gateway, reads: str) -> None:
    """A stream that reads another key's turn ends when its own key is revoked, and the turn goes on."""
    tenant = await gateway.tenant()
    reader = (await gateway.admin.post(f"{TENANTS}/{tenant.id}/keys", json={"name": "reader"})).json()
    gateway.engine.holds_after = 2
    if reads == "session":
        session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
        path = f"/v1/sessions/{session}/events"
        starting = asyncio.create_task(tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "Hi"}))
    else:
        body = {"model": "tiny", "input": "Hi", "background": True}
        starting = asyncio.create_task(tenant.client.post("/v1/responses", json=body))
        path = f"/v1/responses/{(await starting).json()['id']}?stream=true"
    await gateway.engine.held.wait()

    headers = {"authorization": f"Bearer {reader['key']}"}
    async with (
        gateway_on_port(gateway) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
        client.stream("GET", path) as stream,
    ):
        lines = stream.aiter_lines()
        first = await anext(lines)
        await gateway.admin.delete(f"{TENANTS}/{tenant.id}/keys/{reader['id']}")
        rest = [line async for line in lines]
    gateway.engine.release.set()
    await starting

    assert first.startswith(("id: ", "event: "))
    assert "event: error" in rest
    assert "access_ended" in rest[-2]
    assert gateway.engine.cancelled == []


async def test_a_request_that_was_let_in_before_the_suspension_starts_nothing(gateway: Gateway) -> None:
    """A request that was authenticated before its tenant's suspension is refused before it generates."""
    tenant = await gateway.tenant()
    principal = await gateway.resources.server.gate.authenticate(tenant.key, "127.0.0.1")
    await end_access(gateway, tenant, "suspend")

    with pytest.raises(Exception, match="suspended") as refused:
        await gateway.resources.inference.accounting.limits_of(principal)

    assert getattr(refused.value, "status", None) == 403


async def leave_a_batch(gateway: Gateway, tenant: TestTenant) -> None:
    """Leaves a batch of which one line is answered, as if its gateway had stopped then."""
    lines = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n' * 2
    upload = {"file": (f"{SECRET}.jsonl", lines)}
    file = (await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await tenant.client.post("/v1/batches", json=body | {"metadata": {"x": SECRET}})).status_code == 200
    server = gateway.resources.server
    claims = BatchClaims(server.database, gateway.resources.batches.files, GatewayLease(), server.clock)
    (batch,) = [one for one in await claims.claim_some(10) if one.tenant_id == tenant.id]
    assert await claims.answer(batch, LineOutcome(1, False, SECRET.encode()), None)


async def use_everything(gateway: Gateway, tenant: TestTenant) -> None:
    """Leaves something of the tenant in every table."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    client = tenant.client
    await leave_a_batch(gateway, tenant)
    await tenant.push_adapter("pirate")
    await client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})
    traced = {"x-graftwork-trace": "1"}
    await client.post("/v1/chat/completions", json=chat(SECRET) | {"model": "pirate"}, headers=traced)
    await gateway.resources.server.trace_store.flush()
    await client.patch("/v1/adapters/pirate", json={"tags": ["pirate"]})
    await client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))
    new = {"name": "pirate", "config": SECRET, "size_bytes": 100, "digest": "sha256:" + "0" * 64}
    upload = (await client.post("/v1/adapter_uploads", json=new)).json()["id"]
    part = {"upload-offset": "0", "content-type": "application/octet-stream"}
    sent = await client.patch(f"/v1/adapter_uploads/{upload}", content=SECRET.encode(), headers=part)
    assert sent.status_code == 200, sent.text
    fetch = {"name": "pirate", "source": "https://files.test/a?sig=secret", "digest": "sha256:" + "0" * 64}
    assert (await client.post("/v1/adapter_uploads", json=fetch)).status_code == 201
    steps = [{"weight": 50, "seconds": 60}]
    started = await client.post("/v1/adapters/pirate/rollouts", json={"version": 2, "steps": steps})
    assert started.status_code == 201, started.text
    limits = {"max_sessions": 100, "soft_budget": "0.000001", "currency": "USD"}
    await gateway.admin.put(f"{TENANTS}/{tenant.id}/quota", json=limits)
    await gateway.admin.put(f"{TENANTS}/{tenant.id}/user_quota?user={SECRET}", json={"requests_per_minute": 100})
    hook = await gateway.admin.put(f"{TENANTS}/{tenant.id}/webhook", json={"url": "https://hooks.example.com/"})
    assert hook.status_code == 200, hook.text
    person = (await gateway.admin.post("/v1/admin/people", json={"subject": tenant.id, "issuer": "https://x"})).json()
    role = {"role": f"tenant-viewer:{tenant.id}"}
    await gateway.admin.post(f"/v1/admin/people/{person['id']}/roles", json=role)
    prices = {"currency": "USD", "rates": {"input": "1", "output": "1"}, "tenant_id": tenant.id}
    await gateway.admin.post("/v1/admin/prices", json=prices)
    session = (await client.post("/v1/sessions", json={"model": "tiny", "tools": tools})).json()["id"]
    headers = {"idempotency-key": "once"}
    gateway.engine.text = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    first = await client.post(f"/v1/sessions/{session}/turns", json={"input": SECRET}, headers=headers)
    assert first.json()["status"] == "awaiting_tool", first.text
    (fork,) = (await client.post(f"/v1/sessions/{session}/fork", json={})).json()["data"]
    gateway.engine.text = "It is there."
    for each in (fork["id"], session):
        outputs = {"outputs": [{"call_id": first.json()["tool_calls"][0]["call_id"], "output": SECRET}]}
        assert (await client.post(f"/v1/sessions/{each}/tool_outputs", json=outputs)).status_code == 200
    conversation = (await client.post("/v1/conversations", json={})).json()["id"]
    body = {"model": "tiny", "input": SECRET}
    answer = (await client.post("/v1/responses", json=body | {"conversation": conversation})).json()
    for _ in range(2):  # the second one is a fork
        await client.post("/v1/responses", json=body | {"previous_response_id": answer["id"]})
    items = f"/v1/conversations/{conversation}/items"
    hidden = (await client.get(items)).json()["data"][0]["id"]
    assert (await client.delete(f"{items}/{hidden}")).status_code == 200
    export = (await client.post("/v1/exports")).json()["id"]
    kept = await gateway.admin.put(f"{TENANTS}/{tenant.id}/retention", json={"usage_days": 400})
    assert kept.status_code == 200, kept.text
    await gateway.resources.rights.worker.tick()
    await in_process_gateway.ended_export(client, f"/v1/exports/{export}")
    server, admin = gateway.resources.server, gateway.resources.admin
    sender = AlertSender(server.clock, ())
    await BudgetAlerts(server.database, server.clock, admin.pepper, sender).watch()


async def roll_up(gateway: Gateway, *tenants: TestTenant) -> None:
    """Adds all usage to the sums, and leaves a request of each tenant that is not in them."""
    server = gateway.resources.server
    await gateway.store_usage()
    await UsageRollups(server.database, server.clock).roll_up()
    for tenant in tenants:
        answer = await tenant.client.post("/v1/chat/completions", json=chat(SECRET) | {"model": "pirate"})
        assert answer.status_code == 200, answer.text
    await gateway.store_usage()


async def rows_by_table(database: Database, tenant_id: str) -> dict[str, int]:
    """Counts the tenant's rows in every table of the schema that names a tenant."""
    counts = {}
    async with database.read() as session:
        for table in await (await session.connection()).run_sync(lambda sync: inspect(sync).get_table_names()):
            columns = (
                {column.name for column in Base.metadata.tables[table].columns}
                if table in Base.metadata.tables
                else set()
            )
            owner = next(
                (name for name in ("tenant_id", "owner", "owner_id", "granted_on") if name in columns),
                "id" if table == "tenants" else None,
            )
            if owner is not None:
                count = text(f"SELECT count(*) FROM {table} WHERE {owner} = :tenant")
                counts[table] = (await session.execute(count, {"tenant": tenant_id})).scalar_one()
    return counts


async def all_text(database: Database, tenant_id: str) -> str:
    """Returns the tenant's rows of the tables that are kept, as text."""
    found: list[Any] = []
    async with database.read() as session:
        for table in ("usage_events", "usage_sums", "audit_entries"):
            rows = text(f"SELECT * FROM {table} WHERE tenant_id = :tenant")
            found += (await session.execute(rows, {"tenant": tenant_id})).all()
    return repr(found)


def files_of(folder: Path) -> list[Path]:
    folders = ("artifacts", "files", "uploads", "exports")
    return [path for each in folders for path in (folder / each).rglob("*") if path.is_file()]


async def test_nothing_of_a_deleted_tenant_is_left(gateway: Gateway, tmp_path: Path) -> None:
    """A tenant deleted while a turn runs loses every row, file and KV page, and another tenant loses nothing."""
    tenant, other = await gateway.tenant(), await gateway.tenant("Other")
    for each in (tenant, other):
        await use_everything(gateway, each)
    await roll_up(gateway, tenant, other)
    database, erasure = gateway.resources.server.database, gateway.resources.admin.erasure
    before = {each.id: await rows_by_table(database, each.id) for each in (tenant, other)}
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    gateway.engine.holds_after = 2
    running = asyncio.create_task(tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": SECRET}))
    await gateway.engine.held.wait()

    deleted = await gateway.admin.delete(f"{TENANTS}/{tenant.id}")
    await running
    await erasure.sweep()
    state = await gateway.admin.get(f"{TENANTS}/{tenant.id}/erasure")
    gateway.clock.advance(SETTLE_S)
    await erasure.sweep()
    end = await gateway.admin.get(f"{TENANTS}/{tenant.id}/erasure")

    assert min(before[tenant.id].values()) > 0, before
    assert deleted.json() == {"id": tenant.id, "object": "tenant.deleted", "deleted": True}
    assert gateway.engine.cancelled == [gateway.engine.requests[-1].request_id]
    assert (state.json()["status"], end.json()["status"]) == ("running", "done")
    left = await rows_by_table(database, tenant.id)
    assert {table for table, count in left.items() if count} | {"usage_unrolled"} == KEPT  # a roll-up may empty it
    kept = await all_text(database, tenant.id)
    assert SECRET not in kept
    assert "pirate" not in kept
    others = await rows_by_table(database, other.id)
    moved = ("usage_sums", "usage_unrolled")  # a roll-up may have come between
    assert others | dict.fromkeys(moved, 0) == before[other.id] | dict.fromkeys(moved, 0)
    assert others["usage_sums"] >= before[other.id]["usage_sums"]
    kept_files = files_of(tmp_path / "data")
    assert not [path for path in kept_files if tenant.id in path.parts]
    of_uploads = [path for path in kept_files if "uploads" in path.parts]
    assert [path.read_text() for path in of_uploads if path.stat().st_size] == [SECRET, SECRET], "its parts are there"
    assert len(kept_files) - len(of_uploads) == 6  # the other tenant has the same two versions, a file and an export
    assert gateway.engine.forgotten_domains[-1] == gateway.engine.requests[-1].domain
    assert (await gateway.admin.get(f"{TENANTS}/{tenant.id}")).status_code == 404
    assert (await gateway.admin.get(f"{TENANTS}/{other.id}/erasure")).status_code == 404
    audit = (await gateway.admin.get("/v1/admin/audit?limit=1")).json()["data"]
    assert [(entry["action"], entry["tenant_id"]) for entry in audit] == [("tenant.erased", tenant.id)]


async def test_the_files_of_the_last_tenant_with_an_adapter_are_removed(gateway: Gateway, tmp_path: Path) -> None:
    """When no other tenant has the adapter, its files and its weights in the engine are gone."""
    tenant = await gateway.tenant()
    await tenant.push_adapter()
    assert len(files_of(tmp_path / "data")) == 2

    await gateway.admin.delete(f"{TENANTS}/{tenant.id}")
    await gateway.resources.admin.erasure.sweep()

    assert files_of(tmp_path / "data") == []
    assert len(gateway.engine.forgotten) == 1


async def test_the_checks_of_a_deleted_tenants_schemas_are_forgotten(gateway: Gateway) -> None:
    """The gateway forgets what it found in a deleted tenant's schemas, and keeps what it found in another's."""
    tenant, other = await gateway.tenant(), await gateway.tenant("Other")
    planner = gateway.resources.inference.planner
    schema = {"type": "object", "properties": {"a": {"enum": [SECRET]}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for each in (tenant, other):
        await each.client.post("/v1/chat/completions", json=chat(response_format=wanted))
    before = [planner.num_checks(each.id) for each in (tenant, other)]

    await gateway.admin.delete(f"{TENANTS}/{tenant.id}")
    await gateway.resources.admin.erasure.sweep()

    assert before == [1, 1]
    assert [planner.num_checks(each.id) for each in (tenant, other)] == [0, 1]


async def test_an_erasure_goes_on_after_a_crash_and_waits_for_the_engine(
    tmp_path: Path, tiny_model: Path, database_url: str
) -> None:
    """An erasure that was interrupted, or whose engine was absent, is finished by the next gateway."""
    settings = replace(gateway_settings(tmp_path / "data", tiny_model, database_url), batch_concurrency=0)
    async with open_gateway(settings) as first:
        tenant = await first.tenant()
        await use_everything(first, tenant)
        first.engine.absence = Unavailable("No engine answers at present.", retry_after_s=1.0)
        await first.resources.account.tenancy.delete_tenant(tenant.id)
        first.clock.advance(SETTLE_S)
        await first.resources.admin.erasure.sweep()
        unfinished = await first.resources.admin.erasure.get(tenant.id)

    async with open_gateway(settings) as second:
        second.clock.advance(SETTLE_S)
        num_erased = await second.resources.admin.erasure.sweep()
        again = await second.resources.admin.erasure.sweep()

        assert unfinished.erased_at is None
        assert (num_erased, again) == (1, 0)
        assert len(second.engine.forgotten_domains) == 1


async def test_a_late_request_leaves_nothing(gateway: Gateway) -> None:
    """A request that was let in before the deletion creates no session and no adapter after it."""
    tenant = await gateway.tenant()
    principal = await gateway.resources.server.gate.authenticate(tenant.key, "127.0.0.1")
    await gateway.resources.account.tenancy.delete_tenant(TenantId(tenant.id))
    with pytest.raises(Exception, match="deleted"):
        await gateway.resources.sessions.sessions.create(principal, NewSession("tiny"))

    async with gateway.resources.server.database.read() as session:
        assert await find_of_tenant(session, principal.scope(), None, 1) == []
