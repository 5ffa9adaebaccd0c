"""Defines the JSON answers of `/v1/files`, `/v1/batches` and `/v1/messages/batches`. The names of fields are those of
OpenAI's and Anthropic's APIs.
"""

from typing import Literal

from graftwork.platform.answers.base import Answer


class FileObject(Answer):
    """A file of the tenant."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    """The time at which the server deletes the file, in Unix seconds."""
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(Answer):
    """The result of a file's deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class BatchError(Answer):
    """Something that is wrong with the input of a batch."""

    code: str
    message: str
    param: str | None
    line: int | None
    """The number of the line in the input file, from 1. It is null for the whole file."""


class BatchErrors(Answer):
    """What is wrong with the input of a batch that has failed."""

    object: Literal["list"] = "list"
    data: tuple[BatchError, ...]


class BatchRequestCounts(Answer):
    """The requests of a batch: all of them, those with an answer, and those with an error."""

    total: int
    completed: int
    failed: int


class BatchInputDetails(Answer):
    """How many of the input tokens were cached."""

    cached_tokens: int


class BatchOutputDetails(Answer):
    """How many of the output tokens are the model's reasoning."""

    reasoning_tokens: int


class BatchTokens(Answer):
    """The tokens of all requests of a batch that were answered."""

    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class Batch(Answer):
    """A batch of requests, in OpenAI's form. All times are in Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    """The model that the first request names."""
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchState
    output_file_id: str | None
    """The file with the answers, one line for each request that has one. It is null before the end, and without any."""
    error_file_id: str | None
    """The file with the errors, one line for each request that has no answer."""
    created_at: int
    in_progress_at: int | None
    expires_at: int
    """The time at which the batch stops, with what it has by then."""
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    usage: BatchTokens
    metadata: dict[str, str] | None


class MessageBatchCounts(Answer):
    """The requests of a batch of messages. All of them count as `processing` until the batch has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Answer):
    """A batch of messages, in Anthropic's form. All times are RFC 3339."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = None
    results_url: str | None
    """The address of the results, once the batch has ended."""


class MessageBatchPage(Answer):
    """One page of the batches of messages, the newest first."""

    data: tuple[MessageBatch, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(Answer):
    """The result of the deletion of a batch of messages."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"
