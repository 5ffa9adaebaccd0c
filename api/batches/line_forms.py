"""Writes one line of a batch's output: the answer to a request, or its error, in the form of the batch's API.

OpenAI's form has the answer or the refusal as an HTTP response, and its own error for a request that was never answered:

    {"id": …, "custom_id": …, "response": {"status_code": 200, "request_id": …, "body": …}, "error": null}
    {"id": …, "custom_id": …, "response": null, "error": {"code": "batch_expired", "message": …}}

Anthropic's form has one of four results:

    {"custom_id": …, "result": {"type": "succeeded" | "errored" | "canceled" | "expired", …}}
"""

import json
from collections.abc import Mapping
from typing import Any

from graftwork.api.http.error_forms import anthropic_error
from graftwork.platform.batches.batch import Batch, BatchForm, BatchStatus
from graftwork.platform.batches.input_lines import LineRequest
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MISSING = {
    BatchStatus.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
    BatchStatus.FAILED: ("batch_failed", "This request was not executed, because the batch failed: see its errors."),
}
"""The code and message of a request that was never answered, by the end of its batch."""
_RESULTS = {BatchStatus.EXPIRED: "expired", BatchStatus.CANCELLED: "canceled"}


def request_id_of(batch: Batch, line: int) -> RequestId:
    """Returns the id of the request that answers a line. It begins with the batch's id, so usage records show it.

    A later attempt, by another gateway, has another id.
    """
    return RequestId(f"{batch.id}.{line}.{batch.epoch}")


def answer_line(batch: Batch, request: LineRequest, body: Mapping[str, Any]) -> bytes:
    """Returns the line for a request that was answered."""
    if batch.form is BatchForm.ANTHROPIC:
        return _result(request, {"type": "succeeded", "message": body})
    return _response(batch, request, 200, body)


def error_line(batch: Batch, request: LineRequest, error: GraftworkError) -> bytes:
    """Returns the line for a request that was refused, or that failed."""
    if batch.form is BatchForm.ANTHROPIC:
        request_id = request_id_of(batch, request.number)
        return _result(request, {"type": "errored", "error": anthropic_error(error) | {"request_id": request_id}})
    return _response(batch, request, error.status, error.body())


def missing_line(batch: Batch, request: LineRequest) -> bytes:
    """Returns the line for a request that was never answered, because its batch has ended before."""
    ending = batch.ending or BatchStatus.FAILED
    code, message = _MISSING.get(ending, _MISSING[BatchStatus.FAILED])
    if batch.form is BatchForm.OPENAI:
        return _line(
            {
                "id": _line_id(batch, request.number),
                "custom_id": request.custom_id,
                "response": None,
                "error": {"code": code, "message": message},
            }
        )
    if ending in _RESULTS:
        return _result(request, {"type": _RESULTS[ending]})
    error = {"type": "error", "error": {"type": "permission_error", "message": message}, "request_id": None}
    return _result(request, {"type": "errored", "error": error})


def _response(batch: Batch, request: LineRequest, status: int, body: Mapping[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": request_id_of(batch, request.number), "body": body}
    line_id = _line_id(batch, request.number)
    return _line({"id": line_id, "custom_id": request.custom_id, "response": response, "error": None})


def _result(request: LineRequest, result: Mapping[str, Any]) -> bytes:
    return _line({"custom_id": request.custom_id, "result": result})


def _line_id(batch: Batch, line: int) -> str:
    return f"batch_req_{batch.id.partition('_')[2]}_{line}"


def _line(value: Mapping[str, Any]) -> bytes:
    return _encode(value).encode()
