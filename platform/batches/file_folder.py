"""Writes and reads the content of tenants' files, in one folder for each tenant.

    <root>/<tenant id>/<file id>            a complete file
    <root>/<tenant id>/<file id>.sealed     a complete file that is encrypted
    <root>/<tenant id>/<file id>.new        a file that is being written

Owns the paths. Never knows which files there should be: FileKeeper does.
Invariant: a file has its name only when all its bytes are on the disk.
Every call blocks its thread, and raises Unavailable if the disk is full or broken.
"""

import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from graftwork.platform.batches.stored_file import unknown_file
from graftwork.platform.encryption.sealed_file import SealedWriter, open_sealed
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import TenantId

PIECE_BYTES = 1024 * 1024
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_UNFINISHED = ".new"
_SEALED = ".sealed"


class NewContent:
    """A file that is being written. Call `complete` or `discard` at the end."""

    def __init__(self, path: Path, data_key: bytes | None, context: bytes) -> None:
        """With a `data_key` the content is encrypted; see SealedWriter."""
        self._path = path if data_key is None else path.with_suffix(_SEALED)
        self._unfinished = path.with_suffix(_UNFINISHED)
        with _storage_errors():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._unfinished.open("xb")
            self._sealed = None if data_key is None else SealedWriter(self._file, data_key, context)

    def write(self, piece: bytes) -> None:
        with _storage_errors():
            (self._sealed or self._file).write(piece)

    def complete(self) -> None:
        """Makes the file durable, and gives it its name."""
        with _storage_errors():
            if self._sealed is not None:
                self._sealed.finish()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._unfinished.rename(self._path)
            _sync_folder(self._path.parent)

    def discard(self) -> None:
        """Deletes what was written, also after an error of `complete`."""
        with suppress(OSError):  # the error that led here is the one to report; a sweep deletes the rest
            self._file.close()
            self._unfinished.unlink(missing_ok=True)


class FileFolder:
    """The folder with the files of all tenants."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, tenant_id: TenantId, file_id: str, data_key: bytes | None = None) -> NewContent:
        """Opens a new file for writing, which is encrypted if there is a data key."""
        return NewContent(self._path(tenant_id, file_id), data_key, _context(tenant_id, file_id))

    def open(self, tenant_id: TenantId, file_id: str, data_key: bytes | None = None) -> BinaryIO:
        """Opens a complete file for reading, encrypted or not.

        Raises NotFound if it is not in this folder, and InternalFailure if it is encrypted with another key.
        """
        path = self._path(tenant_id, file_id)
        with _storage_errors():
            with suppress(FileNotFoundError):
                return path.open("rb")
            try:
                sealed = path.with_suffix(_SEALED).open("rb")
            except FileNotFoundError:
                raise unknown_file(file_id) from None
            try:
                return open_sealed(sealed, data_key or b"", _context(tenant_id, file_id))
            except BaseException:
                sealed.close()
                raise

    def delete(self, tenant_id: TenantId, file_id: str) -> None:
        """Deletes a file, also one that is only half written. Who has opened it before can still read it."""
        path = self._path(tenant_id, file_id)
        with _storage_errors():
            for each in (path, path.with_suffix(_SEALED), path.with_suffix(_UNFINISHED)):
                each.unlink(missing_ok=True)

    def delete_tenant(self, tenant_id: TenantId) -> None:
        """Deletes all files of a tenant, also those that a crash has left."""
        with _storage_errors():
            shutil.rmtree(self._folder(tenant_id), ignore_errors=False, onerror=_unless_missing)

    def _folder(self, tenant_id: TenantId) -> Path:
        if not _NAME.fullmatch(tenant_id):
            raise unknown_file(tenant_id)
        return self._root / tenant_id

    def _path(self, tenant_id: TenantId, file_id: str) -> Path:
        """Returns the path of a file. Raises NotFound for a text that is no id, so no other text becomes a path."""
        if not _NAME.fullmatch(file_id):
            raise unknown_file(file_id)
        return self._folder(tenant_id) / file_id


def _context(tenant_id: TenantId, file_id: str) -> bytes:
    return f"{tenant_id}/{file_id}".encode()


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the rest of an open file piece by piece, so that memory holds one piece."""
    while piece := file.read(PIECE_BYTES):
        yield piece


def _unless_missing(_function: object, _path: str, problem: tuple[object, BaseException, object]) -> None:
    if not isinstance(problem[1], FileNotFoundError):
        raise problem[1]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors() -> Generator[None]:
    """Converts the errors of a full or broken disk to Unavailable."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"Files cannot be stored or read now ({error.strerror}): the operator must look at the data folder.",
            code="file_store_unavailable",
            retry_after_s=5.0,
        ) from error
