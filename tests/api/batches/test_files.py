"""Tests of `/v1/files`: what may be stored, how long, and where it is."""

from pathlib import Path

import pytest

from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from tests.api.batches.conftest import Batching, create, get, line, upload
from tests.api.in_process_gateway import Gateway, TestTenant

DAY_S = 86_400.0


def stored(folder: Path) -> list[Path]:
    return [path for path in (folder / "files").rglob("*") if path.is_file()]


async def test_a_file_comes_back(gateway: Gateway, tenant: TestTenant, tmp_path: Path) -> None:
    """A file has the bytes that were sent, and is gone after its deletion."""
    content = b"\x00\xff{}\n" * 300_000
    file_id = await upload(tenant, content)

    found = (await tenant.client.get(f"/v1/files/{file_id}")).json()
    downloaded = await tenant.client.get(f"/v1/files/{file_id}/content")
    listed = (await tenant.client.get("/v1/files", params={"purpose": "batch"})).json()
    deleted = await tenant.client.delete(f"/v1/files/{file_id}")

    assert (found["bytes"], found["filename"], found["purpose"]) == (len(content), "requests.jsonl", "batch")
    assert downloaded.content == content
    assert [one["id"] for one in listed["data"]] == [file_id]
    assert (await tenant.client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
    assert deleted.json() == {"id": file_id, "object": "file", "deleted": True}
    assert (await tenant.client.get(f"/v1/files/{file_id}/content")).status_code == 404
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, "expires_after[seconds]"),
    ],
)
async def test_a_wrong_form_is_a_400(tenant: TestTenant, form: dict[str, str], param: str) -> None:
    """A wrong field of the form is named."""
    answer = await tenant.client.post("/v1/files", data=form, files={"file": ("x", b"{}")})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_limit_of_bytes(gateway: Gateway, tenant: TestTenant, tmp_path: Path) -> None:
    """A tenant has no more bytes in files than its quota allows, and a deletion makes room."""
    await gateway.resources.account.tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(max_file_bytes=1000))
    first = await upload(tenant, b"x" * 600)

    refused = await tenant.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"x" * 401)})
    await tenant.client.delete(f"/v1/files/{first}")
    again = await upload(tenant, b"x" * 401)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "max_file_bytes_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert [path.name for path in stored(tmp_path)] == [again]


async def test_a_full_disk_leaves_nothing(gateway: Gateway, tenant: TestTenant, tmp_path: Path) -> None:
    """A file that cannot be written is a 503, and neither its row nor its bytes stay."""
    (tmp_path / "files").write_text("not a folder")

    answer = await tenant.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"{}")})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_store_unavailable")
    assert (await tenant.client.get("/v1/files")).json()["data"] == []
    (tmp_path / "files").unlink()
    assert await gateway.resources.batches.files.sweep() == 0


async def test_files_expire(batching: Batching, tenant: TestTenant, tmp_path: Path) -> None:
    """A file ends with its own time or with the server's, whichever is first; a file that a batch reads stays."""
    form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    short = await tenant.client.post("/v1/files", data=form, files={"file": ("x", b"{}")})
    batch = await create(tenant, [line("a")])
    files, clock = batching.gateway.resources.batches.files, batching.gateway.clock

    clock.advance(3601)
    shown = (await tenant.client.get(f"/v1/files/{short.json()['id']}")).status_code
    listed = [one["id"] for one in (await tenant.client.get("/v1/files")).json()["data"]]
    num_short = await files.sweep()
    clock.advance(40 * DAY_S)
    num_used = await files.sweep()
    await batching.run()
    num_late = await files.sweep()

    assert (shown, listed) == (404, [batch["input_file_id"]])
    assert (num_short, num_used, num_late) == (1, 0, 1)
    ended = await get(tenant, batch)
    assert ended["status"] == "expired"
    assert [path.name for path in stored(tmp_path)] == [ended["error_file_id"]]


async def test_old_batches_are_deleted(batching: Batching, tenant: TestTenant, tmp_path: Path) -> None:
    """An ended batch goes with the server's retention, and a batch of messages takes its files with it."""
    batch = await create(tenant, [line("a")])
    params = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    requests = {"requests": [{"custom_id": "x", "params": params}]}
    messages = (await tenant.client.post("/v1/messages/batches", json=requests)).json()
    await batching.run()
    batches = batching.gateway.resources.batches

    before = await batches.batches.sweep()
    batching.gateway.clock.advance(31 * DAY_S)
    after = await batches.batches.sweep()
    await batches.files.sweep()

    assert (before, after) == (0, 2)
    assert (await tenant.client.get(f"/v1/batches/{batch['id']}")).status_code == 404
    assert (await tenant.client.get(f"/v1/messages/batches/{messages['id']}")).status_code == 404
    assert stored(tmp_path) == []


async def test_a_file_in_use_is_not_deleted(batching: Batching, tenant: TestTenant) -> None:
    """The input of an unfinished batch cannot be deleted; after the end it can, and the output stays."""
    batch = await create(tenant, [line("a")])
    path = f"/v1/files/{batch['input_file_id']}"

    refused = await tenant.client.delete(path)
    await batching.run()
    deleted = await tenant.client.delete(path)

    assert (refused.status_code, deleted.status_code) == (409, 200)
    assert (await get(tenant, batch))["output_file_id"] is not None


async def test_the_output_of_another_purpose_is_no_input(batching: Batching, tenant: TestTenant) -> None:
    """The output of a batch is not the input of another one."""
    batch = await create(tenant, [line("a")])
    await batching.run()
    output = (await get(tenant, batch))["output_file_id"]

    body = {"input_file_id": output, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = await tenant.client.post("/v1/batches", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_file_id")


async def test_a_lost_input_waits_for_its_window(batching: Batching, tenant: TestTenant, tmp_path: Path) -> None:
    """A batch whose input is not in this server's folder is left to others, and fails when its window is over."""
    batch = await create(tenant, [line("a")])
    for path in stored(tmp_path):
        path.unlink()

    await batching.run()
    waiting = await get(tenant, batch)
    batching.gateway.clock.advance(DAY_S + 60)
    await batching.run()
    ended = await get(tenant, batch)

    assert waiting["status"] == "validating"
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "input_file_lost")
