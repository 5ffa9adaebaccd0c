"""Defines a tenant's stored file, and the errors about files."""

from dataclasses import dataclass
from enum import StrEnum

from graftwork.platform.errors import NotFound
from graftwork.platform.ids import TenantId

FILE_PREFIX = "file"


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    """The requests of batches. Clients upload these files."""
    BATCH_OUTPUT = "batch_output"
    """The answers or the errors of a batch. The server writes these files."""
    MESSAGE_BATCH = "message_batch"
    """The requests or the results of a batch of messages. The API shows them only as part of their batch."""


SHOWN_PURPOSES = (FilePurpose.BATCH, FilePurpose.BATCH_OUTPUT)
"""The purposes of the files that `/v1/files` shows."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a tenant. Its content never changes."""

    id: str
    tenant_id: TenantId
    purpose: FilePurpose
    filename: str
    size_bytes: int
    created_at: float
    expires_at: float
    is_ready: bool = False
    """Whether the content is complete. Nobody but the server sees a file that is not ready."""


def unknown_file(file_id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no file {file_id[:80]!r}.", param=param, code="file_not_found")
