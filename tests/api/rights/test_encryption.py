"""Tests of a gateway that encrypts tenants' files: what is on its disk, what clients get, and what it refuses."""

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.platform.batches.file_folder import FileFolder
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.errors import InternalFailure, InvalidRequest
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.erasure import SETTLE_S
from tests.api.batches.conftest import new_runner
from tests.api.in_process_gateway import Gateway, TestTenant, gateway_settings, open_gateway
from tests.api.rights.test_exports import exported

WORDS = b"what the tenant has said"
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "tiny", "prompt": WORDS.decode()},
}


@pytest.fixture
def plain(tmp_path: Path, tiny_model: Path) -> Settings:
    return replace(gateway_settings(tmp_path / "data", tiny_model), batch_concurrency=0)


@pytest.fixture
def encrypting(plain: Settings, tmp_path: Path) -> Settings:
    path = tmp_path / "master.key"
    MasterKeyFile.create(path)
    return replace(plain, master_key_file=path)


async def upload(tenant: TestTenant, content: bytes = WORDS * 10) -> str:
    file = {"file": ("requests.jsonl", content)}
    answer = await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=file)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def download(tenant: TestTenant, file_id: str) -> bytes:
    return (await tenant.client.get(f"/v1/files/{file_id}/content")).content


def stored(settings: Settings, folder: str = "files") -> dict[str, bytes]:
    """The files on the disk, by their names."""
    return {path.name: path.read_bytes() for path in (settings.data_dir / folder).rglob("*") if path.is_file()}


async def run_batch(gateway: Gateway, tenant: TestTenant) -> str:
    """Runs a batch of one line. Returns the id of its output file."""
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    body["input_file_id"] = await upload(tenant, json.dumps(LINE).encode())
    batch = (await tenant.client.post("/v1/batches", json=body)).json()["id"]
    runner = await new_runner(gateway)
    await runner.tick()
    await runner.drained()
    found = (await tenant.client.get(f"/v1/batches/{batch}")).json()
    assert found["status"] == "completed", found
    return str(found["output_file_id"])


async def test_files_and_exports_are_encrypted_on_disk(encrypting: Settings, inspector: AdapterInspector) -> None:
    """Uploads, the output of batches and exports come back as they were, and nothing of them is on the disk."""
    async with open_gateway(encrypting, inspector) as gateway:
        tenant = await gateway.tenant()
        gateway.engine.text = "said by the model"
        file = await upload(tenant)
        output = await download(tenant, await run_batch(gateway, tenant))
        _, archive = await exported(tenant.client)

        on_disk = stored(encrypting) | stored(encrypting, "exports")
        assert await download(tenant, file) == WORDS * 10
        assert b"said by the model" in output
        assert archive.read(f"files/{file}") == WORDS * 10
        assert len(on_disk) == 4
        assert {Path(name).suffix for name in on_disk} == {".sealed"}
        for content in on_disk.values():
            assert b"said" not in content
            with pytest.raises(zipfile.BadZipFile):
                zipfile.ZipFile(io.BytesIO(content))


async def test_older_files_stay_readable(plain: Settings, encrypting: Settings, inspector: AdapterInspector) -> None:
    """A file from before encryption was switched on stays as it is; a batch of it works, and new files are encrypted."""
    async with open_gateway(plain, inspector) as gateway:
        tenant = await gateway.tenant()
        old = await upload(tenant)
    async with open_gateway(encrypting, inspector) as gateway:
        tenant = TestTenant(tenant.id, tenant.key, gateway.client(tenant.key))
        new = await upload(tenant)

        assert await download(tenant, old) == await download(tenant, new) == WORDS * 10
        assert stored(encrypting).keys() == {old, f"{new}.sealed"}
        deleted = [await tenant.client.delete(f"/v1/files/{each}") for each in (old, new)]
        assert [answer.status_code for answer in deleted] == [200, 200]
        assert stored(encrypting) == {}


async def test_a_start_without_the_master_keys_is_refused(
    plain: Settings, encrypting: Settings, inspector: AdapterInspector, tmp_path: Path
) -> None:
    """Once there are encrypted files, a gateway does not start without its master keys, or with other ones."""
    async with open_gateway(encrypting, inspector) as gateway:
        await upload(await gateway.tenant())
    MasterKeyFile.create(tmp_path / "other.key")

    for settings in (plain, replace(plain, master_key_file=tmp_path / "other.key")):
        with pytest.raises(InvalidRequest) as refused:
            async with open_gateway(settings, inspector):
                pass
        assert refused.value.param == "master_key_file"


async def test_an_erased_tenants_files_are_noise(encrypting: Settings, inspector: AdapterInspector) -> None:
    """A file of an erased tenant that a backup of the disk brings back cannot be read, for its data key is destroyed."""
    async with open_gateway(encrypting, inspector) as gateway:
        tenant = await gateway.tenant()
        file = await upload(tenant)
        path = encrypting.data_dir / "files" / tenant.id / f"{file}.sealed"
        backup = path.read_bytes()
        await gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")
        gateway.clock.advance(SETTLE_S)
        await gateway.resources.admin.erasure.sweep()
        path.parent.mkdir()
        path.write_bytes(backup)

        assert (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/erasure")).json()["status"] == "done"
        with (
            FileFolder(encrypting.data_dir / "files").open(tenant.id, file) as noise,
            pytest.raises(InternalFailure, match="cannot be read"),
        ):
            noise.read()


async def test_a_rotation_while_the_gateway_runs(encrypting: Settings, inspector: AdapterInspector) -> None:
    """After the master key was rotated and the data keys are wrapped anew, a running gateway reads and writes on."""
    assert encrypting.master_key_file is not None
    async with open_gateway(encrypting, inspector) as gateway:
        tenant = await gateway.tenant()
        file = await upload(tenant)
        rotated = MasterKeyFile.load(encrypting.master_key_file)
        rotated.rotate()
        server = gateway.resources.server
        assert await TenantKeys(server.database, server.clock, rotated).rewrap() == 1

        assert await download(tenant, file) == WORDS * 10
        assert await download(tenant, await upload(tenant)) == WORDS * 10
