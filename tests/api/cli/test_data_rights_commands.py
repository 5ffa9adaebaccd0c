"""Tests of the commands for a tenant's data: exports, retention, erasures and master keys."""

import json
import shutil
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """With the gateway's address and the operator's key in the environment."""
    for name, value in (("URL", live.url), ("ADMIN_KEY", live.admin_key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return graftwork


def test_a_tenant_is_exported(graftwork: Graftwork, live: LiveGateway, tmp_path: Path) -> None:
    """One command writes the whole archive, and leaves none on the server; a file that exists is not overwritten."""
    headers = {"authorization": f"Bearer {live.key}"}
    httpx.post(f"{live.url}/v1/responses", json={"model": "tiny", "input": "Hello"}, headers=headers)
    out = tmp_path / "acme.zip"

    result = graftwork("tenants", "export", "acme", "--out", str(out))
    again = graftwork("tenants", "export", "acme", "--out", str(out))

    assert result.exit_code == 0, result.output
    assert "SHA-256" in result.output
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        assert b"Hello" in archive.read("tables/sessions/items.jsonl")
    assert httpx.get(f"{live.url}/v1/exports", headers=headers).json()["data"] == []
    assert (again.exit_code, "exists" in again.output) == (2, True)


def test_retention_is_set_and_shown(graftwork: Graftwork) -> None:
    """Options change what they name and nothing else, 0 keeps for ever, and a change asks first."""
    first = graftwork("tenants", "retention", "acme", "--session-days", "90", "--file-days", "7", "--yes", "--json")
    second = graftwork("tenants", "retention", "acme", "--file-days", "0", "--response-days", "5", "--yes", "--json")
    refused = graftwork("tenants", "retention", "acme", "--session-days", "1", input="n\n")
    shown = graftwork("tenants", "retention", "acme")

    def days(output: str) -> list[int | None]:
        return [json.loads(output)[f"{kind}_days"] for kind in ("session", "response", "file", "usage")]

    assert days(first.stdout) == [90, None, 7, None]
    assert days(second.stdout) == [90, 5, None, None]
    assert refused.exit_code == 1
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["90", "5", "ever", "ever"]


def test_erasures_are_listed_and_applied(graftwork: Graftwork, tmp_path: Path, sqlite_template: Path) -> None:
    """The list of one database is applied to another one; a wrong file is an error that names its line."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    of_database = ("--data-dir", str(tmp_path))
    out = tmp_path / "erasures.jsonl"

    listed = graftwork("db", "erasures", "list", "--output", str(out), *of_database)
    with out.open("a") as more:
        more.write('{"tenant_id": "ten_elsewhere"}\n')
    applied = graftwork("db", "erasures", "apply", str(out), "--json", *of_database)
    out.write_text("nothing\n")
    wrong = graftwork("db", "erasures", "apply", str(out), *of_database)

    assert (listed.exit_code, "0 deleted tenants" in listed.output) == (0, True)
    assert json.loads(applied.stdout) == {"deleted": 0, "again": 0, "unknown": 1}
    assert (wrong.exit_code, "Line 1" in wrong.output) == (1, True)


def test_master_keys_are_made_rotated_and_applied(graftwork: Graftwork, tmp_path: Path, sqlite_template: Path) -> None:
    """A file is made once; a rotation adds a key; a rewrap says how many data keys there were."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    path = str(tmp_path / "master.key")

    made = graftwork("db", "master-key", "create", path)
    again = graftwork("db", "master-key", "create", path)
    rotated = graftwork("db", "master-key", "rotate", path)
    rewrapped = graftwork("db", "master-key", "rewrap", path, "--data-dir", str(tmp_path))

    assert (made.exit_code, again.exit_code, rotated.exit_code) == (0, 1, 0)
    assert len(json.loads(Path(path).read_text())["keys"]) == 2
    assert "Wrapped 0 data keys" in rewrapped.output


def test_older_rows_are_encrypted_once(graftwork: Graftwork, tmp_path: Path, sqlite_template: Path) -> None:
    """`db encrypt` encrypts a tenant's kept answer, leaves an operator's alone, and finds nothing the second time."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    path, of_database = str(tmp_path / "master.key"), ("--data-dir", str(tmp_path))
    values = [(owner, "key", "digest", "claim", b"an answer", 1.0) for owner in ("ten_1", "admin")]
    with closing(sqlite3.connect(tmp_path / "graftwork.db")) as database, database:
        columns = "owner, key, request_digest, claim, body, created_at"
        database.executemany(f"INSERT INTO idempotency_keys ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)

    graftwork("db", "master-key", "create", path)
    first = graftwork("db", "encrypt", path, *of_database)
    second = graftwork("db", "encrypt", path, "--json", *of_database)
    other = graftwork("db", "encrypt", str(tmp_path / "missing.key"), *of_database)

    assert first.exit_code == 0, first.output
    assert "Encrypted the content of 1 rows." in first.output
    assert "1 rows stay plain" in first.output
    done = {one["table"]: (one["encrypted"], one["left"]) for one in json.loads(second.stdout)}
    assert done["idempotency_keys"] == (0, 1)
    assert "items" in done
    assert (other.exit_code, "cannot be read" in other.output) == (1, True)
    with closing(sqlite3.connect(tmp_path / "graftwork.db")) as database:
        bodies = dict(database.execute("SELECT owner, body FROM idempotency_keys").fetchall())
    assert bodies["admin"] == b"an answer"
    assert b"answer" not in bodies["ten_1"]
