"""Sends adapters in parts, which go on where they stopped, and waits for what the server fetches.

    find an open upload of these very files, or begin one ──► part ──► part ──► … ──► complete

A part that did not arrive is sent again, from the offset that the server names. If the program stops, the next push of the
same files finds the upload and goes on. Owns nothing on the server's side but the upload.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from graftwork.api.sdk.transport.effects import Call, Sleep, Steps
from graftwork.api.sdk.transport.errors import ConfigurationError, ConflictError, ValidationError
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.adapters import UploadCancelled, VersionUpload
from graftwork.platform.answers.base import Page

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
UPLOADS = "/v1/adapter_uploads"
PART_BYTES = 8 * 2**20
_PIECE_BYTES = 2**20
_POLL_S = 0.5
_OPEN = ("fetching", "inspecting")

Progress = Callable[[int, int | None], None]
"""A function that is told how many bytes of the weights have arrived, and how many there are, as far as that is known."""


@dataclass(frozen=True, slots=True)
class AdapterFileSet:
    """The files of an adapter on this machine."""

    config: bytes | None
    """The content of adapter_config.json; None for a GGUF file."""
    weights: Path

    @property
    def size_bytes(self) -> int:
        return self.weights.stat().st_size

    @classmethod
    def at(cls, path: Path) -> Self:
        """Finds the files of a PEFT folder, or a GGUF file. Raises ConfigurationError if one is missing."""
        if path.suffix == ".gguf" and path.is_file():
            return cls(None, path)
        for required in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / required).is_file():
                raise ConfigurationError(f"{path} has no {required}; push the folder that PEFT's save_pretrained made.")
        config = (path / CONFIG_FILE).read_bytes()
        try:
            config.decode()
        except UnicodeDecodeError:
            raise ConfigurationError(
                f"{path / CONFIG_FILE} is no text in UTF-8; push what PEFT's save_pretrained made."
            ) from None
        return cls(config, path / WEIGHTS_FILE)

    def digest(self) -> str:
        """Returns `sha256:…` of the files, one after the other."""
        found = hashlib.sha256(self.config or b"")
        with self.weights.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
        return f"sha256:{found.hexdigest()}"


class AdapterUploads(Resource[R]):
    """Manages uploads in parts, and adapters that the server fetches. Sends requests to `/v1/adapter_uploads`."""

    @operation
    def list(
        self, name: str | None = None, *, limit: int | None = None, after: str | None = None
    ) -> Steps[Page[VersionUpload]]:
        """Lists uploads and fetches, the newest first: of one adapter, or of all."""
        return (yield from self._list(name, limit, after))

    @operation
    def get(self, upload_id: str) -> Steps[VersionUpload]:
        return (yield from self._get(upload_id))

    @operation
    def cancel(self, upload_id: str) -> Steps[UploadCancelled]:
        """Cancels an upload or a fetch, and removes what has arrived."""
        return (yield from self._read(UploadCancelled, Call("DELETE", _path(upload_id))))

    def pushed(
        self, name: str, files: AdapterFileSet, fields: Mapping[str, Any], progress: Progress | None
    ) -> Steps[VersionUpload]:
        """Sends files in parts: goes on with an open upload of the same files, or begins one."""
        digest, upload = files.digest(), None
        for found in (yield from self._list(name, 100, None)):
            is_same = (found.status, found.digest, found.size_bytes) == ("receiving", digest, files.size_bytes)
            if is_same and found.received_bytes is not None:
                upload = found
                break
        upload = upload or (yield from self._create(name, files, digest, fields))
        return (yield from self._send(upload, files, progress))

    def _send(self, upload: VersionUpload, files: AdapterFileSet, progress: Progress | None) -> Steps[VersionUpload]:
        """Sends the parts that are missing, and completes the upload."""
        offset, size = upload.received_bytes or 0, files.size_bytes
        with files.weights.open("rb") as file:
            while offset < size:
                if progress is not None:
                    progress(offset, size)
                file.seek(offset)
                offset = yield from self._part(upload.id, offset, file.read(PART_BYTES))
        if progress is not None:
            progress(size, size)
        return (yield from self._read(VersionUpload, Call("POST", f"{_path(upload.id)}/complete", creates=True)))

    def fetched(self, name: str, source: str, digest: str | None, fields: Mapping[str, Any]) -> Steps[VersionUpload]:
        """Lets the server fetch an adapter in the background."""
        body = {"name": name, "source": source, "digest": digest, **fields}
        return (yield from self._read(VersionUpload, Call("POST", UPLOADS, json=body, creates=True)))

    def ended(self, upload: VersionUpload, progress: Progress | None) -> Steps[VersionUpload]:
        """Asks for a fetch again and again until it has ended. Raises ValidationError if it has failed."""
        while True:
            upload = yield from self._get(upload.id)
            if progress is not None and upload.received_bytes is not None:
                progress(upload.received_bytes, upload.size_bytes)
            if upload.status == "failed":
                error = upload.error or {"code": "unknown", "message": "The server does not say why.", "param": None}
                raise ValidationError(error["message"], code=error["code"], param=error["param"])
            if upload.status not in _OPEN:
                return upload
            yield Sleep(_POLL_S)

    def _part(self, upload_id: str, offset: int, content: bytes) -> Steps[int]:
        """Sends one part. Returns the offset behind what the server has then."""
        headers = {"upload-offset": str(offset), "content-type": "application/octet-stream"}
        call = Call("PATCH", _path(upload_id), content=content, headers=headers)
        try:
            upload = yield from self._read(VersionUpload, call)
        except ConflictError as error:
            if error.code != "wrong_offset":
                raise
            return int(error.details["offset"])  # an earlier try of this part has arrived, wholly or not
        return upload.received_bytes or 0

    def _create(self, name: str, files: AdapterFileSet, digest: str, fields: Mapping[str, Any]) -> Steps[VersionUpload]:
        config = None if files.config is None else files.config.decode()
        body = {"name": name, "size_bytes": files.size_bytes, "digest": digest, "config": config, **fields}
        return (yield from self._read(VersionUpload, Call("POST", UPLOADS, json=body, creates=True)))

    def _get(self, upload_id: str) -> Steps[VersionUpload]:
        return (yield from self._read(VersionUpload, Call("GET", _path(upload_id))))

    def _list(self, name: str | None, limit: int | None, after: str | None) -> Steps[Page[VersionUpload]]:
        query = {"name": name, "limit": limit, "after": after}
        return (yield from self._page(VersionUpload, Call("GET", UPLOADS, query=query)))


def _path(upload_id: str) -> str:
    return f"{UPLOADS}/{path_segment(upload_id)}"
