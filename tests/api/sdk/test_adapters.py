"""Tests of adapters in the SDK: pushing folders and moving aliases."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.sdk.client import AsyncGraftwork, Graftwork
from graftwork.api.sdk.transport.errors import ConfigurationError
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
