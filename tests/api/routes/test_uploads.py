"""Tests of how the gateway receives uploads: on disk, in bounded number, and once."""

import asyncio
import gzip
import hashlib
import io
import tarfile
import tracemalloc
import zipfile
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import assume, given
from hypothesis import strategies as st

from graftwork.api.http.request import UploadRequest
from tests.adapters.adapter_files import config_bytes, weights_bytes
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload

KEY = {"idempotency-key": "k1"}
BOUNDARY = b"a-boundary-of-a-client"
PIECE = 64 * 1024
LARGE_BYTES = 32 * 1024 * 1024


def form_head() -> bytes:
    """Returns a form up to the first byte of its weights."""
    head = b'--%b\r\nContent-Disposition: form-data; name="name"\r\n\r\npirate\r\n' % BOUNDARY
    head += b'--%b\r\nContent-Disposition: form-data; name="config"; filename="c"\r\n\r\n' % BOUNDARY
    head += config_bytes() + b"\r\n"
    return head + b'--%b\r\nContent-Disposition: form-data; name="weights"; filename="w"\r\n\r\n' % BOUNDARY


async def in_pieces(num_bytes: int) -> AsyncIterator[bytes]:
    """Yields a form whose weights are `num_bytes` zero bytes."""
    yield form_head()
    for _ in range(num_bytes // PIECE):
        yield bytes(PIECE)
    yield b"\r\n--%b--\r\n" % BOUNDARY


FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}


async def test_a_large_upload_does_not_fill_memory(tenant: TestTenant) -> None:
    """An upload with an idempotency key takes far less memory than its size."""
    tracemalloc.start()
    try:
        answer = await tenant.client.post("/v1/adapters", content=in_pieces(LARGE_BYTES), headers=FORM | KEY)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "weights")
    assert most < LARGE_BYTES / 4


async def test_a_stored_upload_has_the_bytes_that_were_sent(gateway: Gateway, tenant: TestTenant) -> None:
    """The stored weights are the uploaded ones, byte for byte."""
    digest = (await tenant.push_adapter())["versions"][0]["digest"].removeprefix("sha256:")

    folder = gateway.resources.admin.settings.data_dir / "artifacts" / "sha256" / digest[:2] / digest[2:]

    assert (folder / "adapter_model.safetensors").read_bytes() == adapter_upload()["weights"][1]
    assert (folder / "adapter_config.json").read_bytes() == config_bytes()


async def test_other_weights_under_one_key_are_a_conflict(tenant: TestTenant) -> None:
    """Two uploads with the same key and other files are a 409 that must not be retried."""
    await tenant.client.post("/v1/adapters", data={"name": "a"}, files=adapter_upload(0), headers=KEY)

    answer = await tenant.client.post("/v1/adapters", data={"name": "a"}, files=adapter_upload(1), headers=KEY)

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_key_reused")


@given(
    pieces=st.lists(st.sampled_from([BOUNDARY[:5], BOUNDARY[5:], BOUNDARY[:-1], b"-", b"x", b"\r\n--"]), max_size=12),
    cuts=st.lists(st.integers(0, 500), max_size=6),
)
async def test_the_digest_depends_on_neither_chunks_nor_boundary(pieces: list[bytes], cuts: list[int]) -> None:
    """The digest is that of the whole body without its boundary, however the body is cut into chunks."""
    body = form_head() + b"".join(pieces) + b"\r\n--%b--\r\n" % BOUNDARY
    assume(b"--" + BOUNDARY not in b"".join(pieces))
    marks = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    chunks = [body[start:end] for start, end in pairwise(marks)]
    request = UploadRequest(upload_scope(), receiver(chunks))

    digest = await request.digest()
    await request.close()

    assert digest == hashlib.sha256(b"POST /v1/adapters\n" + body.replace(BOUNDARY, b"")).hexdigest()


def upload_scope() -> dict[str, Any]:
    headers = [(name.encode(), value.encode()) for name, value in FORM.items()]
    return {"type": "http", "method": "POST", "path": "/v1/adapters", "headers": headers, "app": FastAPI()}


def receiver(chunks: list[bytes]) -> Any:
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    waiting = iter([*messages, {"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(waiting)

    return receive


async def test_uploads_in_flight_are_bounded(gateway: Gateway, tenant: TestTenant) -> None:
    """Above a tenant's limit its upload is a 429 before its body is read; then another tenant's is served."""
    other = await gateway.tenant("Other")
    limit, begun, go_on = gateway.resources.admin.settings.max_tenant_uploads, asyncio.Event(), asyncio.Event()
    waiting = 0

    async def held() -> AsyncIterator[bytes]:
        nonlocal waiting
        yield form_head()
        waiting += 1
        if waiting == limit:
            begun.set()
        await go_on.wait()
        yield weights_bytes() + b"\r\n--%b--\r\n" % BOUNDARY

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body of a refused upload is read")
        yield b""

    running = [
        asyncio.create_task(tenant.client.post("/v1/adapters", content=held(), headers=FORM)) for _ in range(limit)
    ]
    await begun.wait()
    refused = await tenant.client.post("/v1/adapters", content=unread(), headers=FORM | KEY)
    admitted = await other.push_adapter()
    go_on.set()
    answers = await asyncio.gather(*running)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_uploads")
    assert refused.headers["retry-after"] == "5"
    assert admitted["name"] == "pirate"
    assert [answer.status_code for answer in answers] == [201] * limit


async def test_an_upload_that_trickles_loses_its_place(gateway: Gateway, tenant: TestTenant) -> None:
    """An upload whose body has not arrived in time is a 408, however steadily it comes, and its place is free."""
    settings = gateway.resources.admin.settings
    sent = 0

    async def trickle() -> AsyncIterator[bytes]:
        nonlocal sent
        yield form_head()
        while sent < 100:
            gateway.clock.advance(settings.upload_timeout_s / 10)
            sent += 1
            yield b"x"

    for _ in range(settings.max_tenant_uploads + 1):
        sent = 0
        answer = await tenant.client.post("/v1/adapters", content=trickle(), headers=FORM)

        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        assert sent < 100
    assert (await tenant.push_adapter())["name"] == "pirate"


async def test_a_long_config_is_refused(tenant: TestTenant) -> None:
    """A configuration of more than 1 MiB is a 422 that names it."""
    files = adapter_upload() | {"config": ("adapter_config.json", b" " * (1 << 20) + config_bytes())}

    answer = await tenant.client.post("/v1/adapters", data={"name": "a"}, files=files)

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "config")


async def test_a_form_of_many_files_is_refused(tenant: TestTenant) -> None:
    """A form with more files than an adapter has is a 422, and takes no place after that."""
    files = [("weights", ("w", b"x"))] * 9

    for _ in range(10):
        answer = await tenant.client.post("/v1/adapters", data={"name": "a"}, files=files, headers=KEY)

        assert answer.status_code == 422, answer.text
        assert "Too many files" in answer.json()["error"]["message"]


async def test_an_oversized_upload_is_cut_off(gateway: Gateway, tenant: TestTenant) -> None:
    """An upload over the limit is a 413 by its declared length at once, and in chunks as soon as the limit is passed."""
    limit = UploadRequest.limit_bytes
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        async for piece in in_pieces(limit + 64 * 1024 * 1024):
            sent += len(piece)
            yield piece

    declared = {"content-length": str(limit + 1)}
    at_once = await tenant.client.post("/v1/adapters", content=form_head(), headers=FORM | declared)
    chunked = await tenant.client.post("/v1/adapters", content=pieces(), headers=FORM)

    assert [answer.status_code for answer in (at_once, chunked)] == [413, 413]
    assert limit < sent <= limit + 2 * PIECE
    assert (await tenant.client.get("/v1/adapters")).json()["data"] == []


def archives() -> dict[str, bytes]:
    """A good adapter in forms that are never opened: a zip, tars with links and absolute names, gzip, and a pickle."""
    files = {"adapter_config.json": config_bytes(), "adapter_model.safetensors": adapter_upload()["weights"][1]}
    zipped, plain, linked = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"/tmp/{name}", content)
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"../../{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    with tarfile.open(fileobj=linked, mode="w") as tar:
        link = tarfile.TarInfo("adapter_model.safetensors")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return {
        "zip": zipped.getvalue(),
        "tar": plain.getvalue(),
        "link": linked.getvalue(),
        "gzip": gzip.compress(files["adapter_model.safetensors"]),
        "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    }


@pytest.mark.parametrize("kind", sorted(archives()))
async def test_archives_links_and_pickles_are_not_opened(tenant: TestTenant, kind: str) -> None:
    """An archive, a link, compressed weights and a pickle are a 422 as weights and as configuration."""
    content = archives()[kind]
    for part in ("weights", "config"):
        files = adapter_upload() | {part: (f"adapter.{kind}", content)}

        answer = await tenant.client.post("/v1/adapters", data={"name": "a"}, files=files)

        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["param"].startswith(part)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x", "C:\\x", "\u202e", "a" * 300])
async def test_names_of_files_have_no_effect(gateway: Gateway, tenant: TestTenant, name: str) -> None:
    """Whatever the parts are called, absolute or long, the files are stored under their digest and nowhere else."""
    files = {part: (name, content) for part, (_, content) in adapter_upload().items()}

    answer = await tenant.client.post("/v1/adapters", data={"name": "a"}, files=files)

    digest = answer.json()["versions"][0]["digest"].removeprefix("sha256:")
    artifacts = gateway.resources.admin.settings.data_dir / "artifacts"
    stored = {str(path.relative_to(artifacts)) for path in artifacts.rglob("*.*") if path.is_file()}
    folder = f"sha256/{digest[:2]}/{digest[2:]}"
    assert stored == {f"{folder}/adapter_config.json", f"{folder}/adapter_model.safetensors"}
