"""Tests of adapters in the SDK: pushing folders and moving aliases."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.sdk.client import AsyncGraftwork, Graftwork
from graftwork.api.sdk.transport.errors import ConfigurationError, ValidationError
from tests.api.sdk.scripted_server import ScriptedServer, error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "support"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 8}')
    (path / "adapter_model.safetensors").write_bytes(b"weights!")
    return path


def adapter(aliases: dict[str, Any] | None = None, versions: tuple[int, ...] = (1, 2, 3)) -> httpx.Response:
    listed = [{"version": version} for version in versions]
    return httpx.Response(200, json={"id": "adp_1", "name": "support", "versions": listed, "aliases": aliases or {}})


def test_a_folder_is_sent_as_it_is(folder: Path) -> None:
    """Both files are uploaded unchanged under the folder's name, and completely again on a retry."""
    server = ScriptedServer(error(503, {"retry-after-ms": "1"}), adapter())

    pushed = server.client().adapters.push(folder)

    assert pushed.newest is not None
    assert pushed.newest.version == 3
    for request in server.requests:
        body = request.content
        assert b"weights!" in body
        assert b'{"r": 8}' in body
        assert b'name="name"\r\n\r\nsupport\r\n' in body


async def test_the_async_client_sends_files_too(folder: Path) -> None:
    """Multipart with open files works on both transports."""
    server = ScriptedServer(adapter())

    async with server.async_client() as client:
        await client.adapters.push(folder, name="other")

    assert b"weights!" in server.requests[0].content


def test_a_folder_without_weights_is_not_sent(tmp_path: Path) -> None:
    """A missing file is named before anything is sent."""
    (tmp_path / "adapter_config.json").write_text("{}")
    server = ScriptedServer()

    with pytest.raises(ConfigurationError, match=r"adapter_model\.safetensors"):
        server.client().adapters.push(tmp_path)


def test_what_is_asked_of_an_alias_and_of_a_deleted_adapter(folder: Path) -> None:
    """Rollbacks, histories, deletions and restores go to their routes, and a push without promotion says so."""
    page = httpx.Response(200, json={"object": "list", "data": [], "has_more": False})
    change = httpx.Response(
        200, json={"adapter": "support", "alias": "prod", "target": {"version": 1}, "previous": None}
    )
    gone = httpx.Response(200, json={"id": "adp_1", "deleted": True})
    server = ScriptedServer(change, page, gone, gone, adapter(), adapter(), adapter(), page, adapter())
    adapters = server.client().adapters

    adapters.rollback("support", alias="beta")
    adapters.history("support", limit=5)
    adapters.delete("support")
    adapters.delete("support", 2, erase=True)
    adapters.restore("support")
    adapters.restore("support", 2)
    adapters.push(folder, promote=False, run="run-42", parent="support@1")
    adapters.list(tags=["a", "b"], name="sup", state="deleted")
    adapters.change("support", tags=["a"], defaults={"system": "Be kind."})

    assert server.lines == [
        "POST /v1/adapters/support/aliases/beta/rollback",
        "GET /v1/adapters/support/aliases/prod/history?limit=5",
        "DELETE /v1/adapters/support",
        "DELETE /v1/adapters/support/versions/2?erase=true",
        "POST /v1/adapters/support/restore",
        "POST /v1/adapters/support/versions/2/restore",
        "POST /v1/adapters",
        "GET /v1/adapters?tag=a&tag=b&name=sup&state=deleted",
        "PATCH /v1/adapters/support",
    ]
    assert b'name="promote"\r\n\r\nfalse\r\n' in server.requests[6].content
    assert b'name="parent"\r\n\r\nsupport@1\r\n' in server.requests[6].content
    assert server.body(8) == {"tags": ["a"], "defaults": {"system": "Be kind."}}


def test_names_cannot_leave_their_path_segment() -> None:
    """A name with a slash is quoted as one path segment."""
    server = ScriptedServer(adapter())

    server.client().adapters.get("../admin")

    assert server.lines == ["GET /v1/adapters/..%2Fadmin"]


class PieceCounter(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A transport that reads a request piece by piece, as a socket does, and remembers the lengths."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        self.lengths += [len(piece) for piece in request.stream]
        return adapter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        self.lengths += [len(piece) async for piece in request.stream]
        return adapter()


@pytest.mark.parametrize("is_async", [False, True])
async def test_weights_are_read_from_disk_piece_by_piece(folder: Path, is_async: bool) -> None:
    """An upload is sent in small pieces, so that memory never holds the weights file."""
    (folder / "adapter_model.safetensors").write_bytes(bytes(8_000_000))
    transport = PieceCounter()

    if is_async:
        async with AsyncGraftwork("http://graftwork.test", "gw_key", transport=transport) as client:
            await client.adapters.push(folder)
    else:
        with Graftwork("http://graftwork.test", "gw_key", transport=transport) as blocking:
            blocking.adapters.push(folder)

    assert sum(transport.lengths) > 8_000_000
    assert max(transport.lengths) <= 128 * 1024


def upload(**fields: Any) -> httpx.Response:
    known = {
        "id": "upl_1",
        "name": "support",
        "status": "receiving",
        "received_bytes": 0,
        "version": None,
        "error": None,
    }
    return httpx.Response(200, json=known | fields)


def uploads(*found: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"object": "list", "data": [*found], "has_more": False})


def test_a_push_in_parts_goes_on_where_the_server_says(folder: Path) -> None:
    """A part whose answer was lost is not sent twice: the server's offset decides, and progress is told."""
    told: list[tuple[int, int | None]] = []
    wrong = httpx.Response(409, json={"error": {"message": "no", "code": "wrong_offset", "offset": 5}})
    dropped = httpx.ReadError("lost")
    server = ScriptedServer(
        uploads(), upload(), dropped, wrong, upload(received_bytes=8), upload(status="ready"), adapter()
    )

    server.client().adapters.push(folder, progress=lambda sent, size: told.append((sent, size)))

    assert server.lines == [
        "GET /v1/adapter_uploads?name=support&limit=100",
        "POST /v1/adapter_uploads",
        "PATCH /v1/adapter_uploads/upl_1",
        "PATCH /v1/adapter_uploads/upl_1",
        "PATCH /v1/adapter_uploads/upl_1",
        "POST /v1/adapter_uploads/upl_1/complete",
        "GET /v1/adapters/support",
    ]
    assert [request.content for request in server.requests[2:5]] == [b"weights!", b"weights!", b"ts!"]
    assert [request.headers["upload-offset"] for request in server.requests[2:5]] == ["0", "0", "5"]
    digest = hashlib.sha256(b'{"r": 8}weights!').hexdigest()
    assert server.body(1)["digest"] == f"sha256:{digest}"
    assert server.body(1)["config"] == '{"r": 8}'
    assert told == [(0, 8), (5, 8), (8, 8)]


def test_a_push_finds_the_upload_of_the_same_files(folder: Path) -> None:
    """A push after an interruption goes on with the open upload of these very files, and no other."""
    files = b'{"r": 8}weights!'
    digest = f"sha256:{hashlib.sha256(files).hexdigest()}"
    same = {"id": "upl_7", "status": "receiving", "digest": digest, "size_bytes": 8, "received_bytes": 6}
    others = [same | change for change in ({"status": "failed"}, {"digest": "sha256:0"}, {"received_bytes": None})]
    server = ScriptedServer(uploads(*others, same), upload(received_bytes=8), upload(status="ready"), adapter())

    server.client().adapters.push(folder, progress=lambda sent, size: None)

    assert server.lines[1:3] == ["PATCH /v1/adapter_uploads/upl_7", "POST /v1/adapter_uploads/upl_7/complete"]
    assert server.requests[1].content == b"s!"


def test_a_gguf_file_has_no_configuration(tmp_path: Path) -> None:
    """A GGUF file goes in parts under its name without the ending."""
    (tmp_path / "support.gguf").write_bytes(b"GGUF")
    server = ScriptedServer(uploads(), upload(), upload(received_bytes=4), upload(status="ready"), adapter())

    server.client().adapters.push(tmp_path / "support.gguf")

    assert (server.body(1)["name"], server.body(1)["config"]) == ("support", None)
    assert server.requests[2].content == b"GGUF"


def test_a_fetch_is_waited_for() -> None:
    """A fetch is asked for until it has ended; without waiting, its first state is returned; a failed one is an error."""
    failure = {"code": "source_refused", "message": "has no weights", "param": "source"}
    server = ScriptedServer(
        *(upload(status=status) for status in ("fetching", "fetching", "inspecting")),
        upload(status="ready", version=3),
        upload(status="fetching"),
        upload(status="fetching"),
        upload(status="failed", error=failure),
    )
    adapters = server.client().adapters

    ready = adapters.fetch("support", "hf:acme/lora@main", promote=False)
    begun = adapters.fetch("support", "hf:acme/lora@main", wait=False)
    with pytest.raises(ValidationError, match="has no weights") as refusal:
        adapters.fetch("support", "hf:acme/lora@main")

    assert (ready.version, begun.status, refusal.value.code) == (3, "fetching", "source_refused")
    assert server.body(0) == {
        "name": "support",
        "source": "hf:acme/lora@main",
        "digest": None,
        "promote": False,
        "run": None,
        "parent": None,
        "data_digest": None,
    }
