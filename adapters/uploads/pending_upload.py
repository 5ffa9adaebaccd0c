"""A version of an adapter that is not there yet: its bytes are still on their way.

    receiving   the client sends them in parts ──► complete ──┐
    fetching    the server fetches them from a source ────────┴──► ready, with a version, or failed, with a reason

Owns the states, and the limits. Never stores anything.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from graftwork.adapters.inspection.upload import PLAIN_PUSH, Push
from graftwork.adapters.sources.source import AdapterSource
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import TenantId

UPLOAD_PREFIX = "upl"


class UploadStatus(StrEnum):
    RECEIVING = "receiving"
    FETCHING = "fetching"
    INSPECTING = "inspecting"
    """A fetched adapter is checked and published. An adapter that a client sends is checked by the call `complete`."""
    READY = "ready"
    FAILED = "failed"


OPEN = (UploadStatus.RECEIVING, UploadStatus.FETCHING, UploadStatus.INSPECTING)
"""The states in which an upload needs room on the disk."""


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What uploads in parts and fetches may take."""

    max_bytes: int
    """The most bytes of one weights file."""
    max_open: int
    """The most uploads of one tenant that have not ended."""
    max_staged_bytes: int
    """The most bytes that the open uploads of all tenants may have together."""
    lives_s: float
    """The seconds after which an upload is removed, whatever its state."""
    fetch_s: float
    """The seconds in which a source must send its files."""
    idle_s: float = 60.0
    """The seconds for which a client that sends a part may be silent."""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """One upload. Its id also names its folder on the disk."""

    id: str
    tenant_id: TenantId
    name: str
    """The name of the adapter."""
    status: UploadStatus
    size_bytes: int
    """The length of the weights, as the client says. While a source has not said it, the most that it may have."""
    digest: str | None
    """`sha256:…` of the weights of an upload, or of all files of a source in their order."""
    created_at: float
    expires_at: float
    source: AdapterSource | None = None
    """Where the server fetches the files from; None if the client sends them."""
    push: Push = field(default=PLAIN_PUSH)
    error: dict[str, Any] | None = None
    """`code`, `message` and `param` of the refusal of a failed upload."""
    version: int | None = None
    """The version that a ready upload has become. The adapter may have had it before."""
    attempts: int = 0
    """How often a gateway has begun to fetch."""

    @property
    def is_open(self) -> bool:
        return self.status in OPEN


def unknown_upload() -> NotFound:
    return NotFound("There is no such upload: it may have expired.", param="upload_id", code="upload_not_found")
