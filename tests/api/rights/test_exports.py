"""Tests of exports over HTTP: that nothing of a tenant is missing in them, and nothing of others is in them."""

import hashlib
import io
import json
import zipfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import text

from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.api.rights.assembly import export_plan
from graftwork.platform.database import Base
from graftwork.platform.exports.export import MAX_ATTEMPTS, MAX_KEPT
from graftwork.platform.exports.platform_sections import LEFT_OUT
from graftwork.platform.exports.sections import Section
from graftwork.platform.exports.worker import REST_S
from graftwork.platform.tenancy.erasure import SETTLE_S
from tests.api.in_process_gateway import Gateway, adapter_upload, ended_export
from tests.api.routes.test_erasure import SECRET, roll_up, rows_by_table, use_everything

EXPORTS = "/v1/exports"


async def exported(client: httpx.AsyncClient, path: str = EXPORTS) -> tuple[dict[str, Any], zipfile.ZipFile]:
    """Makes an export, and returns it with its archive."""
    created = await client.post(path)
    assert created.status_code == 202, created.text
    export = await ended_export(client, f"{path}/{created.json()['id']}")
    content = await client.get(f"{path}/{export['id']}/content")
    assert content.status_code == 200, content.text
    assert hashlib.sha256(content.content).hexdigest() == export["sha256"]
    assert len(content.content) == export["bytes"]
    return export, zipfile.ZipFile(io.BytesIO(content.content))


def table(archive: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(f"tables/{name}.jsonl").splitlines()]


def sections_of(gateway: Gateway) -> dict[str, Section]:
    """The sections of an export by their tables."""
    plan = export_plan(gateway.resources.batches.files.vault, LocalArtifacts(Path("unused")))
    by_table = {section.table.__tablename__: section for section in plan.sections}
    assert len(by_table) == len(plan.sections)
    return by_table


async def test_every_table_is_exported_or_left_out_for_a_reason(gateway: Gateway) -> None:
    """Each table of the schema is a section, or has a reason. The tables that erasures know as a tenant's are sections."""
    tenant = await gateway.tenant()
    await use_everything(gateway, tenant)
    sections = sections_of(gateway)

    of_tenants = set(await rows_by_table(gateway.resources.server.database, tenant.id))

    assert sections.keys() | LEFT_OUT.keys() == set(Base.metadata.tables)
    assert sections.keys() & LEFT_OUT.keys() == set()
    assert of_tenants - sections.keys() == {"data_keys", "usage_unrolled"}


async def test_every_row_and_every_column_is_in_the_archive(gateway_on_either: Gateway) -> None:
    """For each table that names a tenant, the archive has the rows that the database has of this tenant, with all columns
    but those that are withheld, and no row of another tenant.
    """
    gateway = gateway_on_either
    tenant, other = await gateway.tenant(), await gateway.tenant("Other")
    for each in (tenant, other):
        await use_everything(gateway, each)
    await roll_up(gateway)
    rows = await rows_by_table(gateway.resources.server.database, tenant.id)
    del rows["data_keys"], rows["usage_unrolled"]
    for of_the_export_itself in ("exports", "audit_entries"):
        rows[of_the_export_itself] += 1

    export, archive = await exported(tenant.client)

    manifest = json.loads(archive.read("manifest.json"))
    sections = sections_of(gateway)
    for name, num_rows in rows.items():
        section = sections[name]
        found = table(archive, section.name)
        columns = {column.name for column in Base.metadata.tables[name].columns} - section.withheld.keys()
        assert len(found) == num_rows > 0, name
        assert len({section.key_of(row) for row in found}) == num_rows, name
        assert {frozenset(row) for row in found} == {frozenset(columns)}, name
        assert {row[section.owner or ""] for row in found} == {tenant.id}, name
    assert export["rows"] == sum(file["rows"] or 0 for file in manifest["files"])
    everything = b"".join(archive.read(name) for name in archive.namelist())
    assert other.id.encode() not in everything
    assert SECRET.encode() in everything


async def test_tokens_adapters_and_files_are_exact(gateway: Gateway, tmp_path: Path) -> None:
    """Token ids are those that the engine got and made, and the files are those that were uploaded, byte for byte."""
    tenant = await gateway.tenant()
    await tenant.push_adapter("pirate", seed=3)
    lines = b'{"custom_id": "a"}\n\xff\x00' * 1000
    upload = {"file": ("requests.jsonl", lines)}
    file = (await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()
    session = (await tenant.client.post("/v1/sessions", json={"model": "pirate"})).json()["id"]
    for said in ("One \x01 ✓", "Two"):
        turn = await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": said})
        assert turn.json()["status"] == "completed", turn.text

    _, archive = await exported(tenant.client)

    checkpoints = sorted(table(archive, "sessions/checkpoints"), key=lambda row: row["depth"])
    history = [token for checkpoint in checkpoints for token in checkpoint["token_ids"]]
    prompt = list(gateway.engine.requests[-1].prompt_token_ids)
    assert history[: len(prompt)] == prompt
    assert len(prompt) < len(history)
    assert table(archive, "sessions/items")[0]["body"]["content"][0]["text"] == "One \x01 ✓"
    assert archive.read(f"files/{file['id']}") == lines
    (version,) = table(archive, "adapters/versions")
    uploaded = adapter_upload(3)
    folder = f"adapters/{version['digest'].removeprefix('sha256:')}"
    assert archive.read(f"{folder}/adapter_config.json") == uploaded["config"][1]
    assert archive.read(f"{folder}/adapter_model.safetensors") == uploaded["weights"][1]


async def test_the_manifest_has_the_digest_of_each_file(gateway: Gateway) -> None:
    """The manifest names every other file once, with its bytes and its digest, and what is left out."""
    tenant = await gateway.tenant()
    await tenant.push_adapter("pirate")

    _, archive = await exported(tenant.client)

    manifest = json.loads(archive.read("manifest.json"))
    by_name = {file["name"]: file for file in manifest["files"]}
    assert len(by_name) == len(manifest["files"])
    assert by_name.keys() == set(archive.namelist()) - {"manifest.json"}
    for name, file in by_name.items():
        content = archive.read(name)
        assert (file["sha256"], file["size_bytes"]) == (hashlib.sha256(content).hexdigest(), len(content)), name
    assert (manifest["tenant_id"], manifest["left_out"]) == (tenant.id, LEFT_OUT)
    assert "tables/keys.jsonl: key_hash" in manifest["withheld"]


async def test_no_key_is_in_an_export(gateway: Gateway) -> None:
    """Neither an API key nor its hash is in an archive, while the rest of what is known of the key is."""
    tenant = await gateway.tenant()
    async with gateway.resources.server.database.read() as session:
        key_hash = bytes((await session.execute(text("SELECT key_hash FROM api_keys"))).scalar_one())

    _, archive = await exported(tenant.client)

    everything = b"".join(archive.read(name) for name in archive.namelist())
    secrets = (tenant.key.encode(), tenant.key.split("_")[2].encode(), key_hash.hex().encode(), b64encode(key_hash))
    assert all(secret not in everything for secret in secrets)
    (key,) = table(archive, "keys")
    assert (key["name"], key["public_id"]) == ("first", tenant.key.split("_")[1])


async def test_an_operator_exports_a_tenant(gateway: Gateway) -> None:
    """The operator's export has the same rows as the tenant's own, and the audit log has who made and took each."""
    tenant = await gateway.tenant()
    await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "x"})
    path = f"/v1/admin/tenants/{tenant.id}/exports"

    own, first = await exported(tenant.client)
    operators, second = await exported(gateway.admin, path)

    for name in ("sessions/items", "sessions/events", "usage", "keys"):
        assert table(first, name) == table(second, name)
    entries = (await gateway.admin.get("/v1/admin/audit")).json()["data"]
    acts = [(one["action"], one["target"], one["actor"]) for one in reversed(entries) if "export" in one["action"]]
    (key,) = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"]
    assert acts == [
        ("export.created", own["id"], key["id"]),
        ("export.downloaded", own["id"], key["id"]),
        ("export.created", operators["id"], "admin"),
        ("export.downloaded", operators["id"], "admin"),
    ]
    assert [one["id"] for one in (await gateway.admin.get(path)).json()["data"]] == [operators["id"], own["id"]]


async def test_a_tenant_has_three_exports_at_most(gateway: Gateway) -> None:
    """A fourth export is refused until one is deleted, and a deleted one is gone with its archive."""
    tenant = await gateway.tenant()
    made = [(await exported(tenant.client))[0]["id"] for _ in range(MAX_KEPT)]

    refused = await tenant.client.post(EXPORTS)
    deleted = await tenant.client.delete(f"{EXPORTS}/{made[0]}")
    gone = await tenant.client.get(f"{EXPORTS}/{made[0]}/content")
    again = await tenant.client.post(EXPORTS)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_exports")
    assert deleted.json() == {"id": made[0], "object": "export.deleted", "deleted": True}
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "export_not_found")
    assert again.status_code == 202


async def test_a_key_of_some_models_exports_nothing(gateway: Gateway) -> None:
    """A key without the scope, and one that is bound to models, get a 403 on every route for exports."""
    tenant = await gateway.tenant()
    export, _ = await exported(tenant.client)
    tenancy = gateway.resources.account.tenancy
    _, bound = await tenancy.create_key(tenant.id, "bound", adapters=["pirate"])
    _, reading = await tenancy.create_key(tenant.id, "reading", scopes=["read", "usage", "inference", "adapters"])
    path = f"{EXPORTS}/{export['id']}"

    for key, code in ((bound, "adapter_not_allowed"), (reading, "missing_scope")):
        client = gateway.client(key)
        answers = [
            await client.post(EXPORTS),
            await client.get(EXPORTS),
            await client.get(path),
            await client.get(f"{path}/content"),
            await client.delete(path),
        ]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(403, code)}


async def test_an_export_expires(gateway: Gateway, tmp_path: Path) -> None:
    """An export whose time is over is found no more, and the sweep deletes its archive and its row."""
    tenant = await gateway.tenant()
    export, _ = await exported(tenant.client)
    folder = tmp_path / "exports"
    before = [path for path in folder.rglob("*") if path.is_file()]

    gateway.clock.advance(gateway.resources.server.settings.export_retention_s)
    found = await tenant.client.get(f"{EXPORTS}/{export['id']}")
    gateway.clock.advance(1)
    swept = await gateway.resources.rights.exports.sweep()

    assert (len(before), found.status_code, swept) == (1, 404, 1)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert (await tenant.client.get(EXPORTS)).json()["data"] == []


async def test_a_deleted_tenants_exports_are_erased(gateway: Gateway, tmp_path: Path) -> None:
    """No archive of a tenant outlives it, not even one that is being made when it is deleted."""
    tenant = await gateway.tenant()
    await exported(tenant.client)
    await tenant.client.post(EXPORTS)

    await gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")
    await gateway.resources.rights.worker.tick()
    await gateway.resources.admin.erasure.sweep()
    gateway.clock.advance(SETTLE_S)
    await gateway.resources.admin.erasure.sweep()

    assert (await rows_by_table(gateway.resources.server.database, tenant.id))["exports"] == 0
    assert not (tmp_path / "exports" / tenant.id).exists()


async def test_a_file_that_is_lost_fails_the_export(gateway: Gateway, tmp_path: Path) -> None:
    """An export without a file that should be there ends as failed, says which one, and has no archive."""
    tenant = await gateway.tenant()
    upload = {"file": ("requests.jsonl", b"{}")}
    file = (await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()
    (tmp_path / "files" / tenant.id / file["id"]).unlink()

    created = (await tenant.client.post(EXPORTS)).json()
    for _ in range(MAX_ATTEMPTS):
        await gateway.resources.rights.worker.tick()
        gateway.clock.advance(REST_S + 1)
    export = await ended_export(tenant.client, f"{EXPORTS}/{created['id']}")
    content = await tenant.client.get(f"{EXPORTS}/{created['id']}/content")

    assert (export["status"], export["error"]["code"]) == ("failed", "export_file_missing")
    assert file["id"] in export["error"]["message"]
    assert (content.status_code, content.json()["error"]["code"]) == (409, "export_not_ready")
