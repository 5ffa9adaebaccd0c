"""Stores the files of adapters in a bucket, and keeps copies of those that are read on this machine.

    put     weights ──► configuration            (the configuration comes last: with it, the artifact is there)
    open    a copy in the cache folder, fetched first if there is none; the copies used longest ago go
    delete  configuration ──► weights ──► the copy

Owns the objects' names, and the size of the cache. Several gateways and engines share one bucket; each has its own cache.
Invariant: a copy is in the cache only as a whole. Whether it has the digest is checked by whoever uses the weights
(ArtifactAdapterSource), which asks for a new copy if it has not.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from graftwork.adapters.format.identity import is_digest
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    ArtifactPaths,
    ArtifactStore,
    LocalArtifacts,
    unknown_artifact,
)
from graftwork.platform.errors import Unavailable
from graftwork.platform.outbound.buckets import (
    BucketTimes,
    check_bucket_url,
    faults_as_os_errors,
    open_object_store,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_TIMES = BucketTimes(attempt_s=30.0, retry_for_s=15.0)
_CHUNK_BYTES = 8 * 2**20


def open_artifacts(folder: Path, url: str | None, cache_bytes: int) -> ArtifactStore:
    """Returns the store of a server: a bucket with a cache in `folder`, or `folder` itself if `url` is None.

    Raises InvalidRequest if the URL names no bucket.
    """
    return LocalArtifacts(folder) if url is None else BucketArtifacts(url, folder / "copies", cache_bytes)


class BucketArtifacts:
    """An `ArtifactStore` in a bucket. The objects of one adapter are `sha256/ab/cdef…/<file>` below the URL."""

    def __init__(self, url: str, cache: Path, cache_bytes: int) -> None:
        """`cache_bytes` is the size that the folder `cache` may have, besides the adapter that was opened last.

        Raises InvalidRequest if the URL names no bucket. Connects to nothing yet.
        """
        check_bucket_url(url, "artifact_url")
        self._url = url
        self._copies = LocalArtifacts(cache)
        self._cache = cache
        self._cache_bytes = cache_bytes
        self._evicting = Lock()

    def put(self, digest: str, files: AdapterFiles) -> None:
        import obstore

        weights, config = _names(digest)
        if self.exists(digest):
            return
        with _storage_errors(), os.fdopen(os.dup(files.weights.fileno()), "rb") as file:
            file.seek(0)
            obstore.put(self._objects, weights, file, chunk_size=_CHUNK_BYTES)
            obstore.put(self._objects, config, files.config)

    def open(self, digest: str) -> ArtifactPaths:
        """Returns the paths of a copy on this machine, which is fetched if there is none."""
        _names(digest)
        if not self._copies.exists(digest):
            self._fetch(digest)
            self._evict(digest)
        paths = self._copies.open(digest)
        os.utime(paths.weights)  # the copies used longest ago go first
        return paths

    def exists(self, digest: str) -> bool:
        import obstore

        if not is_digest(digest):
            return False
        with _storage_errors():
            try:
                obstore.head(self._objects, _names(digest)[1])
            except FileNotFoundError:
                return False
        return True

    def delete(self, digest: str) -> None:
        import obstore

        if not is_digest(digest):
            return
        for name in reversed(_names(digest)):
            with _storage_errors():
                try:
                    obstore.delete(self._objects, name)
                except FileNotFoundError:
                    continue
        self._copies.delete(digest)

    def renew(self, digest: str) -> bool:
        self._copies.delete(digest)
        return True

    @cached_property
    def _objects(self) -> "ObjectStore":
        return open_object_store(self._url, _TIMES)

    def _fetch(self, digest: str) -> None:
        weights, config = _names(digest)
        try:
            with _storage_errors(), self._copies.staging(digest) as staged:
                self._copy(config, staged / CONFIG_NAME)
                self._copy(weights, staged / WEIGHTS_NAME)
        except FileNotFoundError:
            raise unknown_artifact(digest) from None

    def _copy(self, name: str, path: Path) -> None:
        import obstore

        with _storage_errors():
            found = obstore.get(self._objects, name)
            with path.open("xb") as file:
                for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                    file.write(chunk)
            if path.stat().st_size != found.meta["size"]:
                raise OSError(f"the object has {found.meta['size']} bytes, and {path.stat().st_size} came")

    def _evict(self, opened: str) -> None:
        """Removes the copies that were used longest ago, until the cache has its size. That of `opened` stays."""
        with self._evicting:
            copies = []
            for path in self._cache.glob(f"sha256/*/*/{WEIGHTS_NAME}"):
                with suppress(FileNotFoundError):  # another process evicts too
                    found = path.stat()
                    copies.append(
                        (found.st_mtime_ns, found.st_size, f"sha256:{path.parent.parent.name}{path.parent.name}")
                    )
            total = sum(size for _, size, _ in copies)
            for _, size, digest in sorted(copies):
                if total <= self._cache_bytes:
                    return
                if digest != opened:
                    self._copies.delete(digest)
                    total -= size


def _names(digest: str) -> tuple[str, str]:
    """Returns the names of the two objects: the weights and the configuration. Raises NotFound for a text that is no
    digest.
    """
    if not is_digest(digest):
        raise unknown_artifact(digest)
    letters = digest.removeprefix("sha256:")
    folder = f"sha256/{letters[:2]}/{letters[2:]}"
    return f"{folder}/{WEIGHTS_NAME}", f"{folder}/{CONFIG_NAME}"


@contextmanager
def _storage_errors() -> Generator[None]:
    """Converts the errors of the bucket and of the disk to Unavailable; a missing object stays a FileNotFoundError."""
    try:
        with faults_as_os_errors():
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        message = (
            f"The bucket of adapter files does not answer ({error}): try again, or ask the operator (artifact_url)."
        )
        raise Unavailable(message, code="artifact_store_unavailable", retry_after_s=5.0) from error
