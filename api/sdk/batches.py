"""Defines `client.files` and `client.batches`, with the names of OpenAI's SDK.

file = client.files.create("requests.jsonl")
batch = client.batches.create(file.id, endpoint="/v1/chat/completions")
…
for line in client.files.content(batch.output_file_id).splitlines(): …
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.api.sdk.transport.retries import send
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.files import Batch, FileDeleted, FileObject

_FILES, _BATCHES = "/v1/files", "/v1/batches"


class Files(Resource[R]):
    """Manages the tenant's files. Sends requests to `/v1/files`."""

    @operation
    def create(
        self, path: str | Path, *, purpose: str = "batch", expires_after_s: int | None = None
    ) -> Steps[FileObject]:
        """Uploads a file with the requests of a batch: one in JSON a line.

        The server deletes it after `expires_after_s` seconds, or by its own setting. Raises ConfigurationError if there
        is no such file.
        """
        source = Path(path)
        if not source.is_file():
            raise ConfigurationError(f"{source} is no file: give one with a request in JSON a line.")
        form = {"purpose": purpose}
        if expires_after_s is not None:
            form |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
        with source.open("rb") as content:
            call = Call("POST", _FILES, form=form, files={"file": (source.name, content)}, creates=True)
            return (yield from self._read(FileObject, call))

    @operation
    def list(
        self,
        *,
        purpose: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        order: str | None = None,
    ) -> Steps[Page[FileObject]]:
        """Lists files: those that were uploaded (`batch`), and the output of batches (`batch_output`)."""
        query = {"purpose": purpose, "limit": limit, "after": after, "order": order}
        return (yield from self._page(FileObject, Call("GET", _FILES, query=query)))

    @operation
    def get(self, file_id: str) -> Steps[FileObject]:
        return (yield from self._read(FileObject, Call("GET", f"{_FILES}/{path_segment(file_id)}")))

    @operation
    def content(self, file_id: str) -> Steps[bytes]:
        """Downloads a file."""
        call = Call("GET", f"{_FILES}/{path_segment(file_id)}/content")
        response = yield from send(call, self._runtime.policy)
        return response.content

    @operation
    def delete(self, file_id: str) -> Steps[FileDeleted]:
        """Deletes a file. Raises ConflictError while a batch reads it."""
        return (yield from self._read(FileDeleted, Call("DELETE", f"{_FILES}/{path_segment(file_id)}")))


class Batches(Resource[R]):
    """Manages the tenant's batches of requests. Sends requests to `/v1/batches`."""

    @operation
    def create(
        self,
        input_file_id: str,
        *,
        endpoint: str = "/v1/chat/completions",
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Steps[Batch]:
        """Creates a batch of the requests in an uploaded file."""
        body: dict[str, Any] = {
            "input_file_id": input_file_id,
            "endpoint": endpoint,
            "completion_window": completion_window,
        }
        if metadata is not None:
            body["metadata"] = dict(metadata)
        return (yield from self._read(Batch, Call("POST", _BATCHES, json=body, creates=True)))

    @operation
    def list(
        self, *, limit: int | None = None, after: str | None = None, order: str | None = None
    ) -> Steps[Page[Batch]]:
        """Lists batches, the newest first."""
        query = {"limit": limit, "after": after, "order": order}
        return (yield from self._page(Batch, Call("GET", _BATCHES, query=query)))

    @operation
    def get(self, batch_id: str) -> Steps[Batch]:
        return (yield from self._read(Batch, Call("GET", f"{_BATCHES}/{path_segment(batch_id)}")))

    @operation
    def cancel(self, batch_id: str) -> Steps[Batch]:
        """Cancels a batch: requests that run are still answered. Raises ConflictError if the batch has ended."""
        path = f"{_BATCHES}/{path_segment(batch_id)}/cancel"
        return (yield from self._read(Batch, Call("POST", path, creates=True)))
