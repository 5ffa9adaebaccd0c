"""Defines the JSON answers about a tenant's rights over its data: exports, and how long data is kept."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from graftwork.platform.answers.base import Answer


class ExportError(Answer):
    """Why an export has failed."""

    code: str
    message: str


class Export(Answer):
    """An export of everything that a tenant has."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["export"] = "export"
    tenant_id: str
    status: Literal["queued", "running", "completed", "failed"]
    created_at: int
    started_at: int | None
    ended_at: int | None
    expires_at: int | None
    """The time at which the server deletes the archive, in Unix seconds. Null before the end."""
    rows: int
    """The rows that are in the archive so far."""
    bytes: int
    """The bytes of the archive so far."""
    sha256: str | None
    """The SHA-256 digest of the whole archive, in hexadecimal digits. Null before the end."""
    error: ExportError | None


MIN_USAGE_DAYS = 62
"""The fewest days for which usage rows are kept: the invoices of this month and the last need them."""
MAX_DAYS = 36_500
Days = Annotated[int | None, Field(ge=1, le=MAX_DAYS)]
UsageDays = Annotated[int | None, Field(ge=MIN_USAGE_DAYS, le=MAX_DAYS)]


class Retention(Answer):
    """For how many days the server keeps a tenant's data. Null means: for as long as the tenant exists."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    session_days: Days = None
    """The days after its last change for which a session is kept. One that runs a turn is never deleted."""
    response_days: Days = None
    """The days for which responses are kept, and conversations after their last change. The server's own limit of 30
    days holds for responses too."""
    file_days: Days = None
    """The days for which files and ended batches are kept. The server's own limit `file_retention_s` holds too."""
    usage_days: UsageDays = None
    """The days for which the usage row of each request is kept. Invoices of older months then show nothing; what was
    spent in this month and the last stays."""


class TenantRetention(Retention):
    """The retention of one tenant."""

    object: Literal["retention"] = "retention"
    tenant_id: str
