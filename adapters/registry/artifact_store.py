"""Stores the two files of each adapter, the configuration and the weights, under the adapter's digest.

The two files together are called an artifact. Owns the folders and the writing of the files. Never decides whether the
files are still needed: the registry does.
Invariant: a stored file never changes. For each digest, both files are stored or none, even after a crash during a
write.
"""

import os
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from graftwork.adapters.format.identity import is_digest
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.platform.errors import NotFound, Unavailable

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ArtifactPaths:
    """The paths of the two stored files of an adapter."""

    config: Path
    weights: Path


class ArtifactStore(Protocol):
    """The interface of a store for the files of adapters.

    Every call blocks its thread. A call may be repeated, and several threads may call at the same time. Every call
    raises Unavailable if the storage fails.
    """

    def put(self, digest: str, files: AdapterFiles) -> None:
        """Stores the two files so that they survive a crash. If files are stored under this digest already, changes
        nothing.
        """
        ...

    def open(self, digest: str) -> ArtifactPaths:
        """Returns the paths of the two files of `digest`. Raises NotFound if no files are stored under this digest."""
        ...

    def exists(self, digest: str) -> bool: ...

    def delete(self, digest: str) -> None:
        """Deletes the files of `digest` if they exist. A process that has opened a file before can still read it."""
        ...

    def renew(self, digest: str) -> bool:
        """Gives up this machine's copy of files that turned out to be damaged or gone. Returns whether `open` fetches
        another.
        """
        ...


class LocalArtifacts:
    """An `ArtifactStore` in a local folder. The files of one adapter are in a subfolder `sha256/ab/cdef…/`, named by
    the digest.

    `put` writes the files into a temporary folder first, and then renames this folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, digest: str, files: AdapterFiles) -> None:
        folder = self._folder(digest)
        if folder.is_dir():
            return
        with _storage_errors(), self.staging(digest) as staged:
            _write_durably(staged / CONFIG_NAME, (files.config,))
            _write_durably(staged / WEIGHTS_NAME, _pieces(files.weights.fileno()))

    @contextmanager
    def staging(self, digest: str) -> Generator[Path]:
        """Makes an empty folder for the two files of `digest`, and gives it its place when the block has ended well."""
        folder = self._folder(digest)
        with self._passing() as passing:
            staged = passing / "artifact"
            staged.mkdir()
            yield staged
            _sync_folder(staged)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                staged.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another writer was first; equal digests mean equal adapters
                    raise
            _sync_folder(folder.parent)

    def open(self, digest: str) -> ArtifactPaths:
        folder = self._folder(digest)
        if not folder.is_dir():
            raise unknown_artifact(digest)
        return ArtifactPaths(folder / CONFIG_NAME, folder / WEIGHTS_NAME)

    def exists(self, digest: str) -> bool:
        return is_digest(digest) and self._folder(digest).is_dir()

    def delete(self, digest: str) -> None:
        if not self.exists(digest):
            return
        folder = self._folder(digest)
        with _storage_errors(), self._passing() as passing:
            with suppress(FileNotFoundError):  # another caller was first
                folder.rename(passing / "artifact")  # no reader finds it from now on, even if removing it takes long
            _sync_folder(folder.parent)

    def renew(self, digest: str) -> bool:
        return False  # the files are no copies

    def _folder(self, digest: str) -> Path:
        """Returns the folder of a digest.

        Raises NotFound for a text that is not a digest, so no other text becomes a path.
        """
        if not is_digest(digest):
            raise unknown_artifact(digest)
        letters = digest.removeprefix("sha256:")
        return self._root / "sha256" / letters[:2] / letters[2:]

    @contextmanager
    def _passing(self) -> Generator[Path]:
        """Makes a temporary folder for an artifact that is being stored or deleted.

        Files that a crash leaves there can be removed.
        """
        home = self._root / "passing"
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as passing:
            yield Path(passing)


@contextmanager
def _storage_errors() -> Generator[None]:
    """Converts the errors of a full or broken disk to Unavailable."""
    try:
        yield
    except OSError as error:
        message = f"Adapter files cannot be stored ({error.strerror}): the operator must look at the data folder."
        raise Unavailable(message, code="artifact_store_unavailable") from error


def _pieces(descriptor: int) -> Iterator[bytes]:
    """Yields the content of an open file piece by piece, so that memory holds one piece."""
    offset = 0
    while piece := os.pread(descriptor, _PIECE_BYTES, offset):
        yield piece
        offset += len(piece)


def _write_durably(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the names of the files in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unknown_artifact(digest: str) -> NotFound:
    return NotFound(f"There is no adapter artifact {digest[:80]!a}.", param="digest", code="artifact_not_found")
