"""Keeps the bytes of uploads until they are complete: two files in a folder for each upload.

    <root>/<tenant id>/<upload id>/config     adapter_config.json; missing for a GGUF file
    <root>/<tenant id>/<upload id>/weights    as many bytes as have arrived

The length of `weights` is the offset at which the upload goes on. Owns the paths, and who may write: one writer at a time,
of all processes that share the folder. Never knows which uploads there should be.
Every call but the methods of StagedFile blocks its thread, and raises Unavailable if the disk is full or broken.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from graftwork.adapters.uploads.pending_upload import PendingUpload, unknown_upload
from graftwork.platform.errors import Conflict, Unavailable
from graftwork.platform.ids import TenantId

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_PIECE_BYTES = 2**20


class StagedFile:
    """The weights of one upload while they are written. Bytes go to the file by the megabyte, on another thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unwritten = bytearray()
        self.offset = os.fstat(file.fileno()).st_size
        """How many bytes there are, with those that are not written yet."""

    async def write(self, chunk: bytes) -> None:
        """Adds bytes at the end."""
        self._unwritten += chunk
        self.offset += len(chunk)
        if len(self._unwritten) >= _PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Writes what is not written yet. A caller that is cancelled waits for that too."""
        piece, self._unwritten = self._unwritten, bytearray()
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, piece))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    def flush_now(self) -> None:
        """Writes what is not written yet, at most a megabyte, on this thread."""
        piece, self._unwritten = self._unwritten, bytearray()
        self._write(piece)

    def _write(self, piece: bytearray) -> None:
        with _storage_errors():
            self._file.write(piece)
            self._file.flush()


class StagingFolder:
    """The folder with the bytes of all uploads that a gateway, or several with one data folder, receive."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, upload: PendingUpload, config: bytes | None = None) -> None:
        """Makes the empty folder of an upload. What an earlier attempt has left is removed."""
        folder = self._folder(upload.tenant_id, upload.id)
        with _storage_errors():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)
            if config is not None:
                (folder / "config").write_bytes(config)
            (folder / "weights").touch()

    def put_config(self, upload: PendingUpload, config: bytes) -> None:
        with _storage_errors():
            (self._folder(upload.tenant_id, upload.id) / "config").write_bytes(config)

    def offset(self, upload: PendingUpload) -> int | None:
        """Returns how many bytes of the weights are here; None if the upload is at another gateway's folder."""
        with _storage_errors():
            try:
                return self._weights(upload).stat().st_size
            except FileNotFoundError:
                return None

    @contextmanager
    def writing(self, upload: PendingUpload) -> Generator[StagedFile]:
        """Opens the weights for one writer. What is not written at the end of the block is written then.

        Raises Conflict if another request writes them, or if they are at another gateway.
        """
        with self._opened(upload, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = "Another request sends a part of this upload, or completes it: wait for its end, then ask for the offset."
                raise Conflict(message, code="upload_busy", retry_after_s=1.0) from None
            staged = StagedFile(file)
            try:
                yield staged
            finally:
                staged.flush_now()

    @contextmanager
    def reading(self, upload: PendingUpload) -> Generator[BinaryIO]:
        """Opens the weights for reading. Raises Conflict if they are at another gateway."""
        with self._opened(upload, "rb") as file:
            yield file

    def config(self, upload: PendingUpload) -> bytes:
        """Returns the configuration; empty for a GGUF file."""
        with _storage_errors():
            try:
                return (self._folder(upload.tenant_id, upload.id) / "config").read_bytes()
            except FileNotFoundError:
                return b""

    def remove(self, tenant_id: TenantId, upload_id: str) -> None:
        """Removes the bytes of an upload, if they are here."""
        with _storage_errors():
            shutil.rmtree(self._folder(tenant_id, upload_id), onerror=_unless_missing)

    def abandoned(self, before: float) -> list[tuple[TenantId, str]]:
        """Returns the uploads, as (tenant, upload), that have bytes here to which none was added since `before`."""
        with _storage_errors():
            folders = [path.parent for path in self._root.glob("*/*/weights") if path.stat().st_mtime < before]
        return [(TenantId(folder.parent.name), folder.name) for folder in folders]

    def remove_tenant(self, tenant_id: TenantId) -> None:
        with _storage_errors():
            shutil.rmtree(self._tenant(tenant_id), onerror=_unless_missing)

    @contextmanager
    def _opened(self, upload: PendingUpload, mode: Literal["ab", "rb"]) -> Generator[BinaryIO]:
        if not self._weights(upload).is_file():
            message = (
                "The bytes of this upload are not at this gateway: gateways that share no data folder must each get all "
                "parts of an upload. Send it anew."
            )
            raise Conflict(message, code="upload_elsewhere")
        with _storage_errors():
            file = self._weights(upload).open(mode)
        with file:
            yield file

    def _weights(self, upload: PendingUpload) -> Path:
        return self._folder(upload.tenant_id, upload.id) / "weights"

    def _tenant(self, tenant_id: TenantId) -> Path:
        """Returns the folder of a tenant. Raises NotFound for a text that is no id, so no other text becomes a path."""
        if not _NAME.fullmatch(tenant_id):
            raise unknown_upload()
        return self._root / tenant_id

    def _folder(self, tenant_id: TenantId, upload_id: str) -> Path:
        if not _NAME.fullmatch(upload_id):
            raise unknown_upload()
        return self._tenant(tenant_id) / upload_id


def digest_of(config: bytes, weights: BinaryIO) -> str:
    """Returns `sha256:…` of the two files, one after the other. Blocks its thread."""
    found = hashlib.sha256(config)
    weights.seek(0)
    while piece := weights.read(_PIECE_BYTES):
        found.update(piece)
    return f"sha256:{found.hexdigest()}"


def _unless_missing(_function: object, _path: str, problem: tuple[object, BaseException, object]) -> None:
    if not isinstance(problem[1], FileNotFoundError):
        raise problem[1]


@contextmanager
def _storage_errors() -> Generator[None]:
    """Converts the errors of a full or broken disk to Unavailable."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"Uploads cannot be stored now ({error.strerror}): the operator must look at the data folder.",
            code="artifact_store_unavailable",
            retry_after_s=5.0,
        ) from error
