"""Tests of the digests of a model's files that are kept for its next start."""

import json
import os
from pathlib import Path

import pytest

from graftwork.engine.model.fingerprint import FingerprintReading, KeptDigests, fingerprint
from graftwork.platform.clock import ManualClock

ZEROS = "00" * 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files that a fingerprint is of."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def kept(tmp_path: Path, model: Path, *, later_s: float = 60.0, renew: bool = False) -> KeptDigests:
    """The digests of earlier starts, so long after the last file was written."""
    written_at = max(path.stat().st_ctime for path in model.iterdir())
    return KeptDigests(tmp_path / "kept", model, ManualClock(written_at + later_s), renew=renew)


def kept_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "kept").iterdir()
    return path


def forge(tmp_path: Path, name: str) -> None:
    """Writes a wrong digest of a file over the kept one, so that a reading shows whether it takes what is kept."""
    path = kept_file(tmp_path)
    stored = json.loads(path.read_text())
    (own,) = (one for one in stored["files"] if one.endswith(name))
    stored["files"][own]["sha256"] = ZEROS
    path.write_text(json.dumps(stored))


def test_a_second_start_takes_the_digests_of_the_first(tmp_path: Path, model: Path) -> None:
    """The first start hashes all files; the second has the same fingerprint, and hashes none of them."""
    true = fingerprint(model)
    assert FingerprintReading(model, kept(tmp_path, model)).result() == true
    assert FingerprintReading(model, kept(tmp_path, model)).result("int8") == fingerprint(model, "int8")

    forge(tmp_path, "b.safetensors")

    assert FingerprintReading(model, kept(tmp_path, model)).result() != true
    assert FingerprintReading(model, kept(tmp_path, model, renew=True)).result() == true
    assert FingerprintReading(model, kept(tmp_path, model)).result() == true, "the renewed digests were not kept"


@pytest.mark.parametrize("way", ["written", "replaced", "touched"])
def test_a_changed_file_is_hashed_again(tmp_path: Path, model: Path, way: str) -> None:
    """Also one of the same size whose time of modification somebody has set back. The other digests stay in use."""
    FingerprintReading(model, kept(tmp_path, model)).result()
    forge(tmp_path, "b.safetensors")
    path, before = model / "b.safetensors", (model / "b.safetensors").stat()
    content = bytes(before.st_size) if way != "touched" else path.read_bytes()
    if way == "replaced":
        path.unlink()
    path.write_bytes(content)
    while path.stat().st_ctime_ns == before.st_ctime_ns or path.stat().st_mtime_ns != before.st_mtime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # again until the file system's clock has moved on

    assert FingerprintReading(model, kept(tmp_path, model)).result() == fingerprint(model)
    forge(tmp_path, "a.safetensors")
    assert FingerprintReading(model, kept(tmp_path, model)).result() != fingerprint(model)


def test_a_digest_of_a_file_that_was_just_written_is_not_kept(tmp_path: Path, model: Path) -> None:
    """It may be written again at a time that its file system cannot tell from this one."""
    FingerprintReading(model, kept(tmp_path, model, later_s=1.0)).result()

    assert list((tmp_path / "kept").glob("*")) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 2, "files": {}}',
        '{"format": 1}',
        '{"format": 1, "files": [1]}',
        '{"format": 1, "files": {"FILE": 7}}',
        '{"format": 1, "files": {"FILE": {"status": STATUS, "sha256": "00"}}}',
        '{"format": 1, "files": {"FILE": {"status": STATUS, "sha256": "red"}}}',
        '{"format": 1, "files": {"FILE": {"status": STATUS}}}',
    ],
)
def test_damaged_digests_are_ignored_and_written_anew(tmp_path: Path, model: Path, content: str) -> None:
    FingerprintReading(model, kept(tmp_path, model)).result()
    path, file = kept_file(tmp_path), model / "a.safetensors"
    whole, found = path.read_text(), file.stat()
    status = json.dumps([found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns])
    path.write_text(content.replace("FILE", str(file)).replace("STATUS", status))

    assert FingerprintReading(model, kept(tmp_path, model)).result() == fingerprint(model)
    assert path.read_text() == whole


def test_digests_that_cannot_be_written_are_a_warning(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("no folder")

    assert FingerprintReading(model, kept(tmp_path, model)).result() == fingerprint(model)
    assert [record.message for record in caplog.records] == ["digests_not_kept"]


def test_a_file_that_cannot_be_read_is_named_also_if_another_was_kept(tmp_path: Path, model: Path) -> None:
    FingerprintReading(model, kept(tmp_path, model)).result()
    (model / "a.safetensors").unlink()
    (model / "a.safetensors").mkdir()

    with pytest.raises(Exception, match=r"a\.safetensors cannot be read"):
        FingerprintReading(model, kept(tmp_path, model)).result()
