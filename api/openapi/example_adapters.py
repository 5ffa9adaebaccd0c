"""Holds an example of each object of the API that is about adapters."""

from graftwork.api.openapi.example_objects import CREATED_AT, DIGEST, Json, list_of

ADAPTER: Json = {
    "id": "adp_01hzx",
    "object": "adapter",
    "name": "support",
    "created_at": CREATED_AT,
    "versions": [
        {
            "version": 1,
            "digest": DIGEST,
            "rank": 16,
            "target_modules": ["q_proj", "v_proj"],
            "size_bytes": 1_204_224,
            "status": "ready",
            "held": False,
            "created_at": CREATED_AT,
            "base": "sha256:" + "a" * 64,
            "provenance": {
                "pushed_by": "key_01hzx",
                "run": "run-42",
                "parent": None,
                "data_digest": None,
                "source": None,
            },
        }
    ],
    "aliases": {"prod": {"version": 1}},
    "tags": ["team:care"],
    "defaults": {"system": "You are a support agent."},
    "deleted_versions": [],
}
UPLOAD: Json = {
    "id": "upl_01hzx",
    "object": "adapter.upload",
    "name": "support",
    "status": "receiving",
    "source": None,
    "size_bytes": 1_204_224,
    "received_bytes": 524_288,
    "digest": DIGEST,
    "version": None,
    "error": None,
    "created_at": CREATED_AT,
    "expires_at": CREATED_AT + 86_400,
}
ROLLOUT: Json = {
    "id": "rol_01hzx",
    "object": "adapter.rollout",
    "adapter": "support",
    "alias": "prod",
    "version": 2,
    "stable": 1,
    "steps": [{"weight": 10, "seconds": 600}, {"weight": 50, "seconds": 600}],
    "limits": {"min_requests": 10, "error_rate": 0.02, "refusal_rate": 0.05, "first_token_ratio": 2.0},
    "state": "running",
    "step": 0,
    "step_began_at": CREATED_AT,
    "created_at": CREATED_AT,
    "ended_at": None,
    "reason": None,
    "figures": {"1": {"requests": 90, "errors": 0, "refusals": 0, "first_token_s": 0.2}},
}
ALIAS_EVENT: Json = {
    "id": "1",
    "object": "adapter.alias_event",
    "target": {"version": 1},
    "reason": "set",
    "actor": "key_01hzx",
    "at": CREATED_AT,
}
UPLOAD_ANSWERS: dict[str, Json] = {
    "create_upload": UPLOAD,
    "list_uploads": list_of(UPLOAD),
    "get_upload": UPLOAD,
    "append_to_upload": UPLOAD | {"received_bytes": 1_204_224},
    "complete_upload": UPLOAD | {"status": "ready", "received_bytes": 1_204_224, "version": 1},
    "cancel_upload": {"id": "upl_01hzx", "object": "adapter.upload.deleted", "deleted": True},
}
