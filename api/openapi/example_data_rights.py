"""Holds the examples of exports and retention for the OpenAPI document."""

from graftwork.api.openapi.example_objects import CREATED_AT, Json, list_of

EXPORT: Json = {
    "id": "export_01hzx",
    "object": "export",
    "tenant_id": "ten_01hzx",
    "status": "completed",
    "created_at": CREATED_AT,
    "started_at": CREATED_AT,
    "ended_at": CREATED_AT + 60,
    "expires_at": CREATED_AT + 60 + 7 * 86_400,
    "rows": 1204,
    "bytes": 481_023,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "error": None,
}
_NEW: Json = EXPORT | {
    "status": "queued",
    "started_at": None,
    "ended_at": None,
    "expires_at": None,
    "rows": 0,
    "bytes": 0,
    "sha256": None,
}
_DELETED: Json = {"id": "export_01hzx", "object": "export.deleted", "deleted": True}
_DAYS: Json = {"session_days": 90, "response_days": 30, "file_days": 7, "usage_days": None}
_RETENTION: Json = _DAYS | {"object": "retention", "tenant_id": "ten_01hzx"}

DATA_REQUESTS: dict[str, Json] = {"set_tenant_retention": {"session_days": 90, "response_days": 30, "file_days": 7}}
DATA_ANSWERS: dict[str, Json] = {
    "create_export": _NEW,
    "list_exports": list_of(EXPORT),
    "get_export": EXPORT,
    "delete_export": _DELETED,
    "create_tenant_export": _NEW,
    "list_tenant_exports": list_of(EXPORT),
    "get_tenant_export": EXPORT,
    "delete_tenant_export": _DELETED,
    "get_retention": _RETENTION,
    "get_tenant_retention": _RETENTION,
    "set_tenant_retention": _RETENTION,
}
