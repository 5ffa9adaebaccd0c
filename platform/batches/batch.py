"""Defines a batch of requests: its states, its counts, and the answers to its lines.

    validating ──► in_progress ──► finalizing ──► completed
        │              │  │             ├───────► expired     the completion window was over first
        │              │  │             └───────► failed      its key lost its access
        │              │  └──► cancelling ──────► cancelled
        └──► failed    └──────────────── (cancelling is also reached from validating)

From `ending` on, no line is answered: the answers so far become files. A line without an answer then gets an error that
says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from graftwork.platform.errors import NotFound
from graftwork.platform.ids import KeyId, TenantId

COMPLETION_WINDOW_S = 24 * 3600.0


class BatchForm(StrEnum):
    """The API by which a batch was made. It decides the form of the batch and of its output."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"

    @property
    def id_prefix(self) -> str:
        return "batch" if self is BatchForm.OPENAI else "msgbatch"


class BatchStatus(StrEnum):
    """The state of a batch. The values are OpenAI's."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """The tokens of all lines that were answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Those of the input tokens that were cached."""
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineProblem:
    """What is wrong with an input file. `line` is the number of the line, from 1; None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a tenant, as the database has it."""

    id: str
    tenant_id: TenantId
    key_id: KeyId
    form: BatchForm
    endpoint: str
    """The path to which each line is a request, such as `/v1/chat/completions`."""
    input_file_id: str
    client_metadata: Mapping[str, str] | None
    status: BatchStatus
    created_at: float
    expires_at: float
    ending: BatchStatus | None = None
    """The status with which the batch will end; None while lines may still be answered."""
    errors: tuple[Mapping[str, Any], ...] = ()
    """Why the batch has failed; see LineProblem."""
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None
    total: int = 0
    """The lines of the input file; 0 until it is validated."""
    succeeded: int = 0
    errored: int = 0
    """The lines that were answered with an error; at the end, in OpenAI's form, also those without an answer."""
    usage: BatchUsage = BatchUsage()
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_lives_s: float | None = None
    epoch: int = 0

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """The end of one line: the line of the output or error file, and what it used."""

    line: int
    is_error: bool
    body: bytes
    usage: BatchUsage = BatchUsage()


def unknown_batch(batch_id: str) -> NotFound:
    return NotFound(f"There is no batch {batch_id[:80]!r}.", code="batch_not_found")
