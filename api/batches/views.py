"""Shows files and batches in OpenAI's and Anthropic's forms. Never reads the database."""

from datetime import UTC, datetime
from typing import Literal

from graftwork.platform.answers import files as answers
from graftwork.platform.batches.batch import Batch, BatchStatus
from graftwork.platform.batches.stored_file import FilePurpose, StoredFile
from graftwork.platform.errors import InternalFailure


def file_answer(file: StoredFile) -> answers.FileObject:
    return answers.FileObject(
        id=file.id,
        bytes=file.size_bytes,
        created_at=int(file.created_at),
        expires_at=int(file.expires_at),
        filename=file.filename,
        purpose=_shown_purpose(file.purpose),
    )


def batch_answer(batch: Batch) -> answers.Batch:
    """Returns a batch in OpenAI's form."""

    def ended_as(status: BatchStatus) -> int | None:
        return _seconds(batch.ended_at) if batch.status is status else None

    used = batch.usage
    errors = tuple(answers.BatchError.model_validate(one) for one in batch.errors)
    return answers.Batch(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=answers.BatchErrors(data=errors) if errors else None,
        input_file_id=batch.input_file_id,
        status=batch.status.value,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(batch.created_at),
        in_progress_at=_seconds(batch.in_progress_at),
        expires_at=int(batch.expires_at),
        finalizing_at=_seconds(batch.finalizing_at),
        completed_at=ended_as(BatchStatus.COMPLETED),
        failed_at=ended_as(BatchStatus.FAILED),
        expired_at=ended_as(BatchStatus.EXPIRED),
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=ended_as(BatchStatus.CANCELLED),
        request_counts=answers.BatchRequestCounts(total=batch.total, completed=batch.succeeded, failed=batch.errored),
        usage=answers.BatchTokens(
            input_tokens=used.input_tokens,
            input_tokens_details=answers.BatchInputDetails(cached_tokens=used.cached_tokens),
            output_tokens=used.output_tokens,
            output_tokens_details=answers.BatchOutputDetails(reasoning_tokens=used.reasoning_tokens),
            total_tokens=used.input_tokens + used.output_tokens,
        ),
        metadata=None if batch.client_metadata is None else dict(batch.client_metadata),
    )


def message_batch_answer(batch: Batch, results_url: str) -> answers.MessageBatch:
    """Returns a batch in Anthropic's form. `results_url` is the address of its results, shown once there are some."""
    created_at, expires_at = _text(batch.created_at), _text(batch.expires_at)
    assert created_at is not None
    assert expires_at is not None
    return answers.MessageBatch(
        id=batch.id,
        processing_status=_processing(batch),
        request_counts=_counts(batch),
        created_at=created_at,
        expires_at=expires_at,
        ended_at=_text(batch.ended_at),
        cancel_initiated_at=_text(batch.cancelling_at),
        results_url=None if batch.output_file_id is None else results_url,
    )


def _processing(batch: Batch) -> Literal["in_progress", "canceling", "ended"]:
    if batch.has_ended:
        return "ended"
    return "in_progress" if batch.cancelling_at is None else "canceling"


def _counts(batch: Batch) -> answers.MessageBatchCounts:
    """Returns the counts as Anthropic has them: all requests are in process until the batch has ended."""
    if not batch.has_ended:
        return answers.MessageBatchCounts(processing=batch.total, succeeded=0, errored=0, canceled=0, expired=0)
    missing = batch.total - batch.succeeded - batch.errored
    is_cancelled, is_expired = batch.status is BatchStatus.CANCELLED, batch.status is BatchStatus.EXPIRED
    return answers.MessageBatchCounts(
        processing=0,
        succeeded=batch.succeeded,
        errored=batch.errored + (0 if is_cancelled or is_expired else missing),
        canceled=missing if is_cancelled else 0,
        expired=missing if is_expired else 0,
    )


def _shown_purpose(purpose: FilePurpose) -> Literal["batch", "batch_output"]:
    if purpose is FilePurpose.MESSAGE_BATCH:
        raise InternalFailure("Files of batches of messages are not shown.")
    return "batch" if purpose is FilePurpose.BATCH else "batch_output"


def _seconds(at: float | None) -> int | None:
    return None if at is None else int(at)


def _text(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
