"""Holds the examples of files and batches for the OpenAPI document."""

from graftwork.api.openapi.example_objects import CREATED_AT, QUESTION, Json, list_of

_DAY_S = 86_400
FILE: Json = {
    "id": "file_01hzx",
    "object": "file",
    "bytes": 412,
    "created_at": CREATED_AT,
    "expires_at": CREATED_AT + 30 * _DAY_S,
    "filename": "requests.jsonl",
    "purpose": "batch",
    "status": "processed",
    "status_details": None,
}
BATCH: Json = {
    "id": "batch_01hzx",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "model": "assistant",
    "errors": None,
    "input_file_id": "file_01hzx",
    "completion_window": "24h",
    "status": "completed",
    "output_file_id": "file_01hzy",
    "error_file_id": None,
    "created_at": CREATED_AT,
    "in_progress_at": CREATED_AT + 1,
    "expires_at": CREATED_AT + _DAY_S,
    "finalizing_at": CREATED_AT + 60,
    "completed_at": CREATED_AT + 61,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 2, "completed": 2, "failed": 0},
    "usage": {
        "input_tokens": 48,
        "input_tokens_details": {"cached_tokens": 24},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 60,
    },
    "metadata": {"topic": "weather"},
}
MESSAGE_BATCH: Json = {
    "id": "msgbatch_01hzx",
    "type": "message_batch",
    "processing_status": "ended",
    "request_counts": {"processing": 0, "succeeded": 1, "errored": 0, "canceled": 0, "expired": 0},
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": "2026-01-02T00:00:00Z",
    "ended_at": "2026-01-01T00:01:00Z",
    "cancel_initiated_at": None,
    "archived_at": None,
    "results_url": "http://127.0.0.1:8000/v1/messages/batches/msgbatch_01hzx/results",
}
_MESSAGE: Json = {"model": "assistant", "max_tokens": 64, "messages": QUESTION}

BATCH_REQUESTS: dict[str, Json] = {
    "create_batch": {
        "input_file_id": "file_01hzx",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"topic": "weather"},
    },
    "create_message_batch": {"requests": [{"custom_id": "first", "params": _MESSAGE}]},
}
BATCH_ANSWERS: dict[str, Json] = {
    "create_file": FILE,
    "list_files": list_of(FILE),
    "get_file": FILE,
    "delete_file": {"id": "file_01hzx", "object": "file", "deleted": True},
    "create_batch": BATCH,
    "list_batches": list_of(BATCH),
    "get_batch": BATCH,
    "cancel_batch": BATCH,
    "create_message_batch": MESSAGE_BATCH,
    "list_message_batches": {
        "data": [MESSAGE_BATCH],
        "has_more": False,
        "first_id": "msgbatch_01hzx",
        "last_id": "msgbatch_01hzx",
    },
    "get_message_batch": MESSAGE_BATCH,
    "cancel_message_batch": MESSAGE_BATCH,
    "delete_message_batch": {"id": "msgbatch_01hzx", "type": "message_batch_deleted"},
}
