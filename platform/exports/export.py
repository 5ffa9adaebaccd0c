"""Defines an export of everything that a tenant has: its states, and the errors about exports.

queued ──► running ──► completed ──► deleted when it expires
  ▲           │  └───► failed
  └───────────┘ its gateway has stopped: another one begins again, at most `MAX_ATTEMPTS` times
"""

from dataclasses import dataclass
from enum import StrEnum

from graftwork.platform.errors import NotFound
from graftwork.platform.ids import TenantId

EXPORT_PREFIX = "export"
MAX_ATTEMPTS = 3
"""How often an export is begun, before it fails."""
MAX_KEPT = 3
"""The most exports that a tenant may have at the same time: each is a copy of all its data."""


class ExportStatus(StrEnum):
    """The state of an export."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ExportFailure:
    """Why an export has failed, and what to do about it."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Export:
    """An export of a tenant, as the database has it. Times are in Unix seconds."""

    id: str
    tenant_id: TenantId
    status: ExportStatus
    created_at: float
    requested_by: str
    """The API key, or the operator's name."""
    started_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    """When the server deletes the export; None before its end."""
    num_rows: int = 0
    """The rows of tables that are in the archive so far."""
    size_bytes: int = 0
    """The bytes of the archive so far."""
    sha256: str | None = None
    """The digest of the whole archive, in hexadecimal digits."""
    failure: ExportFailure | None = None
    attempts: int = 0
    epoch: int = 0
    """How often a gateway has claimed the export. Only the last claim may change it."""

    @property
    def content_id(self) -> str:
        """The name of the archive in the folder of exports. Each claim writes another file."""
        return f"{self.id}_{self.epoch}"

    @property
    def has_ended(self) -> bool:
        return self.status in (ExportStatus.COMPLETED, ExportStatus.FAILED)


def unknown_export(export_id: str) -> NotFound:
    return NotFound(f"There is no export {export_id[:80]!r}.", code="export_not_found")
