"""Tests of what only a store in a bucket has: copies on each machine, their end, and a bucket that is away."""

import os
from pathlib import Path

import pytest

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.registry.bucket_artifacts import BucketArtifacts, open_artifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.platform.errors import InvalidRequest, NotFound, Unavailable, ValidationFailed
from tests.adapters.adapter_files import DESCRIPTION, config_bytes, store_files, weights_bytes

DIGESTS = tuple(f"sha256:{letter * 64}" for letter in "abc")


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'bucket'}"


def copies(folder: Path) -> int:
    return len(list(folder.glob("sha256/*/*/*.safetensors")))


def test_machines_share_a_bucket(bucket: str, tmp_path: Path) -> None:
    """What one machine puts, another opens and keeps a copy of; a delete on the first is a delete for both."""
    gateway = BucketArtifacts(bucket, tmp_path / "a", 2**20)
    engine = BucketArtifacts(bucket, tmp_path / "b", 2**20)
    store_files(gateway, DIGESTS[0], b"config", b"weights")

    assert engine.open(DIGESTS[0]).weights.read_bytes() == b"weights"
    assert (copies(tmp_path / "a"), copies(tmp_path / "b")) == (0, 1)
    gateway.delete(DIGESTS[0])
    assert not engine.exists(DIGESTS[0])
    engine.renew(DIGESTS[0])
    with pytest.raises(NotFound):
        engine.open(DIGESTS[0])


def test_the_copies_used_longest_ago_go(bucket: str, tmp_path: Path) -> None:
    """The cache keeps its size: of three copies that do not fit together, the one that was used last stays."""
    store = BucketArtifacts(bucket, tmp_path / "cache", 250)
    for digest in DIGESTS:
        store_files(store, digest, b"config", bytes(100))
    for digest in DIGESTS[:2]:
        os.utime(store.open(digest).weights, (1.0, 1.0))
    store.open(DIGESTS[0])  # so the other one was used longest ago

    paths = store.open(DIGESTS[2])

    assert paths.weights.stat().st_size == 100
    kept = {f"sha256:{path.parent.name}{path.name}" for path in (tmp_path / "cache").glob("sha256/*/*")}
    assert kept == {DIGESTS[0], DIGESTS[2]}


def test_a_damaged_copy_is_fetched_again(bucket: str, tmp_path: Path) -> None:
    """A copy that has changed on this machine is replaced when it is loaded; damage in the bucket is an error."""
    _, digest = identify_adapter(config_bytes(), weights_bytes(), DESCRIPTION)
    store = BucketArtifacts(bucket, tmp_path / "cache", 2**20)
    store_files(store, digest, config_bytes(), weights_bytes())
    source = ArtifactAdapterSource(store, DESCRIPTION)
    first = source.load(digest)
    copy = store.open(digest).weights
    copy.write_bytes(weights_bytes()[:-1] + b"\x01")

    assert source.load(digest).pairs.keys() == first.pairs.keys()
    assert copy.read_bytes() == weights_bytes()
    (stored,) = (tmp_path / "bucket").rglob("*.safetensors")
    stored.write_bytes(weights_bytes()[:-1] + b"\x01")
    store.renew(digest)
    with pytest.raises(ValidationFailed) as damage:
        source.load(digest)
    assert damage.value.code == "artifact_damaged"


def test_without_its_configuration_an_artifact_is_not_there(bucket: str, tmp_path: Path) -> None:
    """A put that a crash has cut off, after the weights, leaves nothing that is found, and is repeated."""
    store = BucketArtifacts(bucket, tmp_path / "cache", 2**20)
    store_files(store, DIGESTS[0], b"config", b"weights")
    (config,) = (tmp_path / "bucket").rglob("adapter_config.json")
    config.unlink()

    assert not store.exists(DIGESTS[0])
    with pytest.raises(NotFound):
        store.open(DIGESTS[0])
    store_files(store, DIGESTS[0], b"config", b"weights")
    assert store.open(DIGESTS[0]).config.read_bytes() == b"config"


def test_a_bucket_that_cannot_be_used(tmp_path: Path) -> None:
    """A URL that names no bucket is refused at the start; a store that cannot write says so, and keeps no half copy."""
    for url in ("s3://", "ftp://models/x", "models"):
        with pytest.raises(InvalidRequest, match="artifact-url"):
            open_artifacts(tmp_path, url, 0)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "sha256").write_bytes(b"a file where a folder should be")
    store = BucketArtifacts(f"file://{tmp_path / 'bucket'}", tmp_path / "cache", 0)

    with pytest.raises(Unavailable, match="artifact_url"):
        store_files(store, DIGESTS[0], b"config", b"weights")
