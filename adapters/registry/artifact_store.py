"""Adapter files by digest.

Owns bytes that never change: a digest has its two files or none, also after a crash in the middle of a write.
Never decides whether an artifact is still needed; the registry does.
"""

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from graftwork.adapters.format.identity import is_digest
from graftwork.platform.errors import CapacityAbsent, NotFound

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class ArtifactPaths:
    """Where an artifact's files can be read."""

    config: Path
    weights: Path


class ArtifactStore(Protocol):
    """Blocking calls; each may be repeated, and any number of them may run at once.

    Raises CapacityAbsent where the storage itself fails.
    """

    def put(self, digest: str, config: bytes, weights: bytes) -> None:
        """Keep the files; keeps those that are there if the digest is known. Durable when it returns."""
        ...

    def open(self, digest: str) -> ArtifactPaths:
        """The files of `digest`. Raises NotFound."""
        ...

    def exists(self, digest: str) -> bool: ...

    def delete(self, digest: str) -> None:
        """Forget the files, if they are there; whoever holds them open can read on."""
        ...


class LocalArtifacts:
    """An `ArtifactStore` in a folder: `sha256/ab/cdef…/`, written beside its place and moved there whole."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, digest: str, config: bytes, weights: bytes) -> None:
        folder = self._folder(digest)
        if folder.is_dir():
            return
        with _storage_errors(), self._passing() as passing:
            staged = passing / "artifact"
            staged.mkdir()
            _write_durably(staged / CONFIG_NAME, config)
            _write_durably(staged / WEIGHTS_NAME, weights)
            _sync_folder(staged)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                staged.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another writer was first, with an equal adapter by definition
                    raise
            _sync_folder(folder.parent)

    def open(self, digest: str) -> ArtifactPaths:
        folder = self._folder(digest)
        if not folder.is_dir():
            raise _unknown(digest)
        return ArtifactPaths(folder / CONFIG_NAME, folder / WEIGHTS_NAME)

    def exists(self, digest: str) -> bool:
        return is_digest(digest) and self._folder(digest).is_dir()

    def delete(self, digest: str) -> None:
        if not self.exists(digest):
            return
        folder = self._folder(digest)
        with _storage_errors(), self._passing() as passing:
            with suppress(FileNotFoundError):  # another caller was first
                folder.rename(passing / "artifact")  # gone at once, even if removing it takes long
            _sync_folder(folder.parent)

    def _folder(self, digest: str) -> Path:
        """Only a digest becomes a path: nothing that a request spells reaches the file system."""
        if not is_digest(digest):
            raise _unknown(digest)
        letters = digest.removeprefix("sha256:")
        return self._root / "sha256" / letters[:2] / letters[2:]

    @contextmanager
    def _passing(self) -> Generator[Path]:
        """A folder for an artifact on its way in or out; what a crash leaves here can be removed."""
        home = self._root / "passing"
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as passing:
            yield Path(passing)


@contextmanager
def _storage_errors() -> Generator[None]:
    """A full or broken disk, as an error that the caller knows."""
    try:
        yield
    except OSError as error:
        message = f"Adapter files cannot be stored ({error.strerror}): the operator must look at the data folder."
        raise CapacityAbsent(message, code="artifact_store_unavailable") from error


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where the system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unknown(digest: str) -> NotFound:
    return NotFound(f"There is no adapter artifact {digest[:80]!a}.", param="digest", code="artifact_not_found")
