"""Tests of the artifact store: files by digest in a folder."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graftwork.adapters.registry.artifact_store import ArtifactStore, LocalArtifacts
from graftwork.adapters.registry.bucket_artifacts import BucketArtifacts
from graftwork.platform.errors import NotFound, Unavailable
from tests.adapters.adapter_files import store_files

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "a" * 63 + "b"


ROOT = "artifacts"


@pytest.fixture
def local(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / ROOT)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """A store in a folder, and in a bucket, for which another folder stands; `tests/clients` has a real one."""
    if request.param == "folder":
        return LocalArtifacts(tmp_path / ROOT)
    return BucketArtifacts(f"file://{tmp_path / ROOT}", tmp_path / "copies", 2**20)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_put_can_be_read(store: ArtifactStore) -> None:
    """Both files of an artifact are read back unchanged, under their usual names."""
    store_files(store, DIGEST, b"config", b"weights")

    paths = store.open(DIGEST)

    assert (paths.config.name, paths.config.read_bytes()) == ("adapter_config.json", b"config")
    assert (paths.weights.name, paths.weights.read_bytes()) == ("adapter_model.safetensors", b"weights")
    assert store.exists(DIGEST)


def test_an_unknown_digest_is_not_found(store: ArtifactStore) -> None:
    """A digest is not found before its put and after its delete."""
    store_files(store, OTHER, b"c", b"w")

    with pytest.raises(NotFound):
        store.open(DIGEST)
    assert not store.exists(DIGEST)


@pytest.mark.parametrize(
    "text", ["", "..", "../../etc", "/etc/passwd", "sha256:../x", "sha256:" + "A" * 64, DIGEST + "/..", "\0" * 71]
)
def test_only_digests_reach_the_file_system(store: ArtifactStore, tmp_path: Path, text: str) -> None:
    """A text that is not a digest is not found, whatever path it spells."""
    with pytest.raises(NotFound):
        store.open(text)
    with pytest.raises(NotFound):
        store_files(store, text, b"c", b"w")
    store.delete(text)
    assert not store.exists(text)
    assert files_below(tmp_path) == []


def test_a_second_put_keeps_what_is_there(store: ArtifactStore) -> None:
    """A second put of a digest does not change its files."""
    store_files(store, DIGEST, b"config", b"weights")
    store_files(store, DIGEST, b"other", b"other")

    assert store.open(DIGEST).config.read_bytes() == b"config"


def test_many_writers_of_one_digest_leave_one_artifact(store: ArtifactStore, tmp_path: Path) -> None:
    """Many writers of one digest all succeed and leave one artifact."""
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(store_files, store, DIGEST, b"config", b"weights") for _ in range(32)]:
            future.result()

    assert len(files_below(tmp_path / ROOT)) == 2


def test_delete_leaves_neighbours_and_open_files(store: ArtifactStore, tmp_path: Path) -> None:
    """A delete keeps open files readable and other digests in place; a second delete is no error."""
    store_files(store, DIGEST, b"config", b"weights")
    store_files(store, OTHER, b"config", b"weights")

    with store.open(DIGEST).weights.open("rb") as file:
        store.delete(DIGEST)
        store.delete(DIGEST)
        assert file.read() == b"weights"

    assert not store.exists(DIGEST)
    assert store.exists(OTHER)
    assert len(files_below(tmp_path / ROOT)) == 2


def test_a_write_that_fails_midway_leaves_nothing(
    local: LocalArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails in the middle leaves no file."""

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(Unavailable, match="No space"):
        store_files(local, DIGEST, b"config", b"weights")

    assert not local.exists(DIGEST)
    assert files_below(tmp_path) == []
