"""Tests of exports in the SDK: waiting, and downloads that are whole or nothing."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.sdk.transport.errors import APIConnectionError, ConfigurationError
from tests.api.sdk.scripted_server import PiecesOfBody, ScriptedServer

ARCHIVE = [b"PK", b"archive" * 1000]
DIGEST = hashlib.sha256(b"".join(ARCHIVE)).hexdigest()


def export(status: str = "completed", **fields: Any) -> httpx.Response:
    return httpx.Response(200, json={"id": "export_1", "status": status, "sha256": DIGEST, **fields})


def content(*, broken: bool = False) -> tuple[httpx.Response, PiecesOfBody]:
    pieces = PiecesOfBody(ARCHIVE, broken)
    return httpx.Response(200, stream=pieces), pieces


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_is_waited_for() -> None:
    """The client asks again until the export has ended, and returns it also if it has failed."""
    server = ScriptedServer(
        export("queued"), export("running"), export("failed", error={"code": "x", "message": "why"})
    )

    ended = server.client().exports.wait("export_1")

    assert ended.error is not None
    assert (ended.status, ended.error.message, len(server.waits)) == ("failed", "why", 2)


async def test_both_clients_download(tmp_path: Path) -> None:
    """The archive is written to the file, and nothing else is left; the operator's path has the tenant."""
    first, second = ScriptedServer(export(), content()[0]), ScriptedServer(export(), content()[0])

    found = first.client().exports.download("export_1", tmp_path / "a.zip")
    async with second.async_client() as client:
        await client.admin.exports.download("ten_1", "export_1", tmp_path / "b.zip")

    assert found.sha256 == DIGEST
    assert files_of(tmp_path) == dict.fromkeys(("a.zip", "b.zip"), b"".join(ARCHIVE))
    paths = [server.requests[-1].url.path for server in (first, second)]
    assert paths == ["/v1/exports/export_1/content", "/v1/admin/tenants/ten_1/exports/export_1/content"]


def test_a_wrong_digest_leaves_no_file(tmp_path: Path) -> None:
    """An archive that is not what the server made is an error, and is not left under the name of the file."""
    server = ScriptedServer(export(sha256="0" * 64), content()[0])

    with pytest.raises(APIConnectionError, match="not the archive"):
        server.client().exports.download("export_1", tmp_path / "a.zip")

    assert files_of(tmp_path) == {}


def test_a_download_that_breaks_leaves_no_file(tmp_path: Path) -> None:
    """A connection that breaks is an error, leaves no file, and is closed."""
    answer, pieces = content(broken=True)
    server = ScriptedServer(export(), answer)

    with pytest.raises(APIConnectionError):
        server.client().exports.download("export_1", tmp_path / "a.zip")

    assert files_of(tmp_path) == {}
    assert pieces.closed


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    """A file that exists is refused before anything is sent."""
    (tmp_path / "a.zip").write_text("mine")
    server = ScriptedServer()

    with pytest.raises(ConfigurationError, match="exists"):
        server.client().exports.download("export_1", tmp_path / "a.zip")

    assert (server.requests, (tmp_path / "a.zip").read_text()) == ([], "mine")
