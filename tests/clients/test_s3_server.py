"""Engines that share KV pages over a real S3 server (moto's), which is stopped and started again; and adapters there."""

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from graftwork.adapters.registry.bucket_artifacts import BucketArtifacts
from graftwork.adapters.sources.bucket_reader import BucketReader
from graftwork.adapters.sources.source import CONFIG_FILE, WEIGHTS_FILE, parse_source
from graftwork.api.cli.demo.server import free_port
from graftwork.api.server.model_sources import fetched_model
from graftwork.engine.kv.disk.shared import SharedStore, open_bucket
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.errors import InvalidRequest, Unavailable, ValidationFailed
from graftwork.platform.settings.values import ModelReference
from tests.adapters.adapter_files import store_files
from tests.adapters.registry.test_artifact_store import (
    DIGEST,
    OTHER,
    test_a_second_put_keeps_what_is_there,
    test_an_unknown_digest_is_not_found,
    test_what_was_put_can_be_read,
)
from tests.clients.environments import python_environment
from tests.engine.faulty_disk import LAYOUT, PAGE_BYTES, chain, domain_named, page_of, pages_of

KEYS = chain("s", 40)
_BUCKET = "kv-pages"
_WITHIN_S = 60


class S3Server:
    """A server that keeps its objects in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server with an empty bucket."""
        command = [str(python_environment("s3-server")), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with (self.folder / "s3.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            with suppress(urllib.error.URLError):
                request = urllib.request.Request(f"{self.url}/{_BUCKET}", method="PUT", data=b"")
                with urllib.request.urlopen(request, timeout=5):
                    return
        raise AssertionError((self.folder / "s3.log").read_text())

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(_WITHIN_S)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "engine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    server.start()
    yield server
    server.stop()


def engine(folder: Path, name: str) -> SharedStore:
    own = DiskStore(folder / name, 2**24, LAYOUT)
    own.open()
    store = open_bucket(own, f"s3://{_BUCKET}/some/prefix", 2**24, LAYOUT)
    store.refresh()
    return store


def write(store: SharedStore, domain: str) -> None:
    """Stores all pages in files of a few, and returns when they are in the bucket, or could not be."""
    for start in range(0, len(KEYS), 4):
        keys = KEYS[start : start + 4]
        store.write(domain_named(domain), keys, pages_of(keys), KEYS[:start])
    store.peers.flush()  # type: ignore[attr-defined]


def read(store: SharedStore) -> int:
    """Reads as many pages as there are, and checks their bytes."""
    space = bytearray(PAGE_BYTES * len(KEYS))
    count = store.read_pages(KEYS, memoryview(space))
    for number, key in enumerate(KEYS[:count]):
        assert bytes(space[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]) == page_of(key), "wrong bytes"
    return count


def test_engines_share_pages_over_s3(server: S3Server, tmp_path: Path) -> None:
    """Pages are written, listed, read and erased by real requests, and another prefix of the bucket stays empty."""
    first, second = engine(tmp_path, "a"), engine(tmp_path, "b")
    write(first, "goes")
    second.refresh()

    assert read(second) == len(KEYS)
    assert second.objects.num_pages == first.counters.object_written == len(KEYS)
    assert (first.counters.object_failed, second.counters.object_failed) == (0, 0)
    second.forget_domain(domain_named("goes"))
    second.sweep()
    first.peers.refresh()
    assert first.objects.num_pages == 0
    for store in (first, second):
        store.check_integrity()
        store.close()


def test_a_server_that_is_away_costs_a_recomputation(server: S3Server, tmp_path: Path) -> None:
    """While the server is away, pages are not found, and faults are counted; what comes later is shared again."""
    first, second = engine(tmp_path, "a"), engine(tmp_path, "b")
    write(first, "x")
    second.refresh()
    server.stop()

    assert read(second) == 0
    assert not any(map(second.holds, KEYS))
    write(second, "y")
    assert read(second) == len(KEYS), "an engine's own files need no server"
    assert second.counters.object_failed > 0
    server.start()  # it has lost all objects
    second.refresh()
    assert second.objects.num_pages == 0
    third = engine(tmp_path, "c")
    write(third, "z")
    first.refresh()
    assert first.objects.num_pages == len(KEYS)
    for store in (first, second, third):
        store.check_integrity()
        store.close()


def test_adapters_are_stored_over_s3(server: S3Server, tmp_path: Path) -> None:
    """A store in a bucket keeps what the store in a folder keeps; while the server is away, a copy can still be opened."""
    contract = (
        test_what_was_put_can_be_read,
        test_an_unknown_digest_is_not_found,
        test_a_second_put_keeps_what_is_there,
    )
    for number, holds in enumerate(contract):
        holds(BucketArtifacts(f"s3://{_BUCKET}/adapters/{number}", tmp_path / f"copies-{number}", 2**30))
    gateway, engine = (
        BucketArtifacts(f"s3://{_BUCKET}/adapters", tmp_path / name, 2**30) for name in ("gateway", "engine")
    )
    weights = bytes(range(256)) * 2**17  # 32 MiB: more than one part
    store_files(gateway, DIGEST, b"config", weights)

    assert engine.open(DIGEST).weights.read_bytes() == weights
    server.stop()
    assert engine.open(DIGEST).config.read_bytes() == b"config"
    with pytest.raises(Unavailable) as away:
        gateway.exists(OTHER)
    assert away.value.code == "artifact_store_unavailable"
    server.start()  # it has lost all objects
    assert not gateway.exists(DIGEST)
    gateway.delete(DIGEST)


async def test_adapters_are_fetched_over_s3(server: S3Server) -> None:
    """The files below a prefix are read as they are; a missing object is a refusal, and a server that is away is not."""
    import obstore
    from obstore.store import from_url

    weights = bytes(range(256)) * 2**14
    obstore.put(from_url(f"s3://{_BUCKET}", client_options={"allow_http": True}), f"a/{WEIGHTS_FILE}", weights)
    source, reader = parse_source(f"s3://{_BUCKET}/a"), BucketReader()

    async with reader.open(source, f"a/{WEIGHTS_FILE}") as remote:
        assert remote.size == len(weights)
        assert b"".join([chunk async for chunk in remote.chunks]) == weights
    with pytest.raises(ValidationFailed, match=r"has no adapter_config\.json"):
        async with reader.open(source, f"a/{CONFIG_FILE}"):
            pass
    server.stop()
    with pytest.raises(Unavailable):
        async with reader.open(source, f"a/{WEIGHTS_FILE}"):
            pass
    server.start()


def test_a_model_in_a_bucket_is_fetched_and_served_while_the_bucket_is_away(server: S3Server, tmp_path: Path) -> None:
    """A model below a prefix is fetched whole, without other files, and stays when the server has stopped."""
    import obstore
    from obstore.store import from_url

    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(range(256)) * 2**16}
    store = from_url(f"s3://{_BUCKET}", client_options={"allow_http": True})
    for name, data in (files | {"pytorch_model.bin": b"pickle"}).items():
        obstore.put(store, f"models/tiny/{name}", data)
    reference = ModelReference(f"s3://{_BUCKET}/models/tiny")

    folder = fetched_model(reference, tmp_path)
    server.stop()
    again = fetched_model(reference, tmp_path)
    server.start()

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert again == folder
    with pytest.raises(InvalidRequest, match=r"has no config\.json"):
        fetched_model(ModelReference(f"s3://{_BUCKET}/models/nobody"), tmp_path)
