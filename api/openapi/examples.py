"""Holds an example request and an example answer for each operation, for the OpenAPI document.

Tests check each example against its schema.
"""

from typing import Any

from graftwork import __version__

Json = dict[str, Any]

_AT = 1_767_225_600
_DIGEST = "sha256:" + "b" * 64
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_PROMPT_TOKENS: Json = {
    "cached_tokens": 16,
    "device_tokens": 16,
    "host_tokens": 0,
    "disk_tokens": 0,
    "recomputed_tokens": 8,
}
_USAGE: Json = {
    "prompt_tokens": 24,
    "completion_tokens": 6,
    "total_tokens": 30,
    "prompt_tokens_details": _PROMPT_TOKENS,
    "completion_tokens_details": {"drafted_tokens": 4, "accepted_tokens": 3, "forced_tokens": 0},
}
_ADAPTER: Json = {
    "id": "adp_01hzx",
    "object": "adapter",
    "name": "support",
    "created_at": _AT,
    "versions": [
        {
            "version": 1,
            "digest": _DIGEST,
            "rank": 16,
            "target_modules": ["q_proj", "v_proj"],
            "size_bytes": 1_204_224,
            "status": "ready",
            "created_at": _AT,
        }
    ],
    "aliases": {"prod": {"version": 1}},
}
_MODEL: Json = {
    "id": "assistant",
    "object": "model",
    "created": 0,
    "owned_by": "graftwork",
    "max_model_len": 4096,
    "root": "assistant",
    "parent": None,
}
_TENANT: Json = {
    "id": "ten_01hzx",
    "object": "tenant",
    "name": "Acme",
    "status": "active",
    "weight": 1.0,
    "service_tier_ceiling": "default",
    "created_at": _AT,
}
_KEY: Json = {
    "id": "key_01hzx",
    "object": "key",
    "tenant_id": "ten_01hzx",
    "name": "production",
    "redacted": "gw_01hzx_…",
    "scopes": ["adapters", "inference", "usage"],
    "created_at": _AT,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}
_QUOTA: Json = {
    "requests_per_minute": 60,
    "tokens_per_minute": None,
    "max_concurrent_requests": None,
    "max_adapters": None,
    "max_adapter_bytes": None,
    "max_adapter_rank": None,
    "max_sessions": 100,
    "max_device_kv_bytes": None,
    "max_host_kv_bytes": None,
    "monthly_tokens": None,
}
_MESSAGE_ITEM: Json = {
    "id": "msg_01hzx",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "It is sunny.", "annotations": []}],
}
_INPUT_ITEM: Json = {
    "id": "item_01hzx",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "How is the weather?"}],
}
_SESSION: Json = {
    "id": "ses_01hzx",
    "object": "session",
    "status": "idle",
    "model": {"name": "support", "version": 1, "digest": _DIGEST},
    "head": "ckp_01hzx",
    "created_at": float(_AT),
    "updated_at": float(_AT),
    "closed_at": None,
    "forked_from": None,
    "running_turn": None,
    "awaiting": [],
    "last_seq": 3,
    "instructions": "Be brief.",
    "tools": [_TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": None,
    "sampling": {"temperature": 0},
    "metadata": {},
    "retention": {"ttl_s": 86400.0},
}
_TURN: Json = {
    "id": "turn_01hzx",
    "object": "turn",
    "session_id": "ses_01hzx",
    "status": "completed",
    "output": [_MESSAGE_ITEM],
    "tool_calls": [],
    "checkpoint_id": "ckp_01hzx",
    "finish_reason": "stop",
    "usage": _USAGE,
    "cache": _PROMPT_TOKENS | {"miss_reason": None},
    "error": None,
    "made_with": None,
    "created_at": float(_AT),
    "finished_at": float(_AT),
}
_RESPONSE: Json = {
    "id": "resp_01hzx",
    "object": "response",
    "created_at": _AT,
    "completed_at": _AT,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "background": False,
    "conversation": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "assistant",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "output": [_MESSAGE_ITEM],
    "usage": {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 30,
    },
}
_CONVERSATION: Json = {"id": "conv_01hzx", "object": "conversation", "created_at": _AT, "metadata": {}}
_HEAD: Json = {"created": _AT, "model": "assistant", "service_tier": "default", "system_fingerprint": "fp_bbbbbbbbbbbb"}
_QUESTION: list[Json] = [{"role": "user", "content": "How is the weather?"}]


def _list(*entries: Json, has_ids: bool = True) -> Json:
    ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if has_ids else {}
    return {"object": "list", "data": [*entries], "has_more": False, "first_id": None, "last_id": None} | ends


_USAGE_ROWS = _list(
    {
        "group": "2026-01-01",
        "requests": 1,
        "prompt_tokens": 24,
        "cached_tokens": 16,
        "completion_tokens": 6,
        "total_tokens": 30,
    },
    has_ids=False,
)

REQUESTS: dict[str, Json] = {
    "create_chat_completion": {"model": "assistant", "messages": _QUESTION, "max_tokens": 64},
    "create_completion": {"model": "assistant", "prompt": ["The weather is"], "max_tokens": 16},
    "create_message": {"model": "assistant", "max_tokens": 64, "messages": _QUESTION},
    "count_tokens": {"model": "assistant", "messages": _QUESTION},
    "tokenize": {"model": "assistant", "prompt": "How is the weather?"},
    "detokenize": {"model": "assistant", "tokens": [1, 2]},
    "create_response": {"model": "assistant", "input": "How is the weather?"},
    "count_input_tokens": {"model": "assistant", "input": "How is the weather?"},
    "create_conversation": {"metadata": {"topic": "weather"}},
    "create_conversation_items": {"items": [{"role": "user", "content": "How is the weather?"}]},
    "change_conversation": {"metadata": {"topic": "climate"}},
    "set_alias": {"version": 1},
    "create_session": {"model": "assistant", "instructions": "Be brief.", "tools": [_TOOL]},
    "change_session": {"metadata": {"topic": "weather"}},
    "fork_session": {"count": 2},
    "rewind_session": {"to": "ckp_01hzx"},
    "create_turn": {"input": "How is the weather?"},
    "send_tool_outputs": {"outputs": [{"call_id": "call_01hzx", "output": "sunny"}]},
    "create_tenant": {"name": "Acme"},
    "update_tenant": {"weight": 2.0},
    "create_key": {"name": "production"},
    "set_tenant_quota": {"requests_per_minute": 60, "max_sessions": 100},
}
"""An example body for each operation. The server accepts the body if the object in the path exists."""

ANSWERS: dict[str, Json] = {
    "get_health": {"status": "ok"},
    "get_readiness": {"status": "ready"},
    "get_version": {"version": __version__},
    "list_models": _list(_MODEL),
    "get_model": _MODEL,
    "create_chat_completion": {
        "id": "chatcmpl-01hzx",
        "object": "chat.completion",
        **_HEAD,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "It is sunny.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    },
    "create_completion": {
        "id": "cmpl-01hzx",
        "object": "text_completion",
        **_HEAD,
        "choices": [{"index": 0, "text": " sunny.", "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    },
    "create_message": {
        "id": "msg_01hzx",
        "type": "message",
        "role": "assistant",
        "model": "assistant",
        "content": [{"type": "text", "text": "It is sunny."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": 6,
            "service_tier": "standard",
        },
    },
    "count_tokens": {"input_tokens": 24},
    "tokenize": {"tokens": [1, 2], "count": 2, "max_model_len": 4096},
    "detokenize": {"prompt": "How is"},
    "create_response": _RESPONSE,
    "get_response": _RESPONSE,
    "cancel_response": _RESPONSE | {"status": "cancelled", "completed_at": None, "output": [], "usage": None},
    "delete_response": {"id": "resp_01hzx", "object": "response", "deleted": True},
    "list_response_input_items": _list(_INPUT_ITEM),
    "count_input_tokens": {"object": "response.input_tokens", "input_tokens": 24},
    "create_conversation": _CONVERSATION,
    "create_conversation_items": _list(_INPUT_ITEM),
    "get_conversation_item": _INPUT_ITEM,
    "get_conversation": _CONVERSATION,
    "change_conversation": _CONVERSATION,
    "delete_conversation": {"id": "conv_01hzx", "object": "conversation.deleted", "deleted": True},
    "list_conversation_items": _list(_MESSAGE_ITEM, _INPUT_ITEM),
    "create_adapter": _ADAPTER,
    "create_version": _ADAPTER,
    "list_adapters": _list(_ADAPTER),
    "get_adapter": _ADAPTER,
    "delete_adapter": {"id": "adp_01hzx", "object": "adapter.deleted", "name": "support", "deleted": True},
    "delete_version": {"object": "adapter.version.deleted", "name": "support", "version": 1, "deleted": True},
    "set_alias": {"adapter": "support", "alias": "prod", "target": {"version": 1}, "previous": None},
    "remove_alias": {"adapter": "support", "alias": "prod", "target": None, "previous": {"version": 1}},
    "create_session": _SESSION,
    "list_sessions": _list(_SESSION),
    "get_session": _SESSION,
    "change_session": _SESSION | {"kv_given_up": {"tokens": 24, "bytes": 98304}},
    "close_session": _SESSION | {"status": "closed", "closed_at": float(_AT)},
    "fork_session": _list(_SESSION),
    "rewind_session": _SESSION,
    "cancel_session": _SESSION,
    "suspend_session": _SESSION | {"status": "suspended"},
    "prefetch_session": {
        "object": "session.prefetch",
        "session_id": "ses_01hzx",
        "history_tokens": 30,
        "prefetched_tokens": 30,
        "missing_tokens": 0,
    },
    "create_turn": _TURN,
    "send_tool_outputs": _TURN,
    "get_tool_outputs": {
        "object": "tool_outputs",
        "session_id": "ses_01hzx",
        "status": "awaiting_tool",
        "outputs": [],
        "tool_calls": [
            {"call_id": "call_01hzx", "name": "get_weather", "arguments": '{"city": "Oslo"}', "deadline_at": None}
        ],
    },
    "list_session_items": _list(_INPUT_ITEM, _MESSAGE_ITEM),
    "get_session_cache": {
        "object": "session.cache",
        "session_id": "ses_01hzx",
        "tiers": {
            "device": {"tokens": 24, "bytes": 98304},
            "host": {"tokens": 6, "bytes": 24576},
            "disk": {"tokens": 0, "bytes": 0},
        },
        "missing_tokens": 0,
        "recomputed_tokens": 8,
        "lease": None,
        "last_miss_reason": None,
    },
    "get_usage": _USAGE_ROWS,
    "get_quota": _QUOTA,
    "create_tenant": _TENANT,
    "list_tenants": _list(_TENANT),
    "get_tenant": _TENANT,
    "update_tenant": _TENANT | {"weight": 2.0},
    "suspend_tenant": _TENANT | {"status": "suspended"},
    "resume_tenant": _TENANT,
    "get_erasure": {
        "object": "tenant.erasure",
        "tenant_id": "ten_01hzx",
        "status": "done",
        "deleted_at": 1763720000.0,
        "erased_at": 1763720020.0,
    },
    "delete_tenant": {"id": "ten_01hzx", "object": "tenant.deleted", "deleted": True},
    "create_key": _KEY | {"key": "gw_01hzx_secret"},
    "list_keys": _list(_KEY),
    "rotate_key": _KEY | {"key": "gw_01hzx_secret"},
    "revoke_key": _KEY | {"revoked_at": float(_AT)},
    "get_tenant_quota": _QUOTA,
    "set_tenant_quota": _QUOTA,
    "get_tenants_usage": _USAGE_ROWS,
    "list_audit_entries": _list(
        {
            "id": "aud_01hzx",
            "object": "audit_entry",
            "at": float(_AT),
            "actor": "admin",
            "action": "tenant.created",
            "tenant_id": "ten_01hzx",
            "target": "ten_01hzx",
            "details": {},
        }
    ),
    "list_replicas": _list(
        {
            "id": "engine-0",
            "object": "replica",
            "address": "unix:/var/lib/graftwork/engine.sock",
            "status": "ready",
            "running_requests": 1,
            "waiting_requests": 0,
            "device_pages": {"free": 90, "cached": 8, "active": 2},
            "host_pages": {"free": 100, "cached": 0},
            "disk_pages": 0,
            "preemptions": 0,
            "resident_adapters": [_DIGEST],
            "max_adapters_in_a_step": 1,
            "generated_tokens": 6,
            "steps": 12,
        }
    ),
    "drain_replica": {
        "id": "engine-0",
        "object": "replica",
        "address": "unix:/var/lib/graftwork/engine.sock",
        "status": "absent",
        "reason": "It is drained.",
    },
}
"""An example answer in JSON for each operation."""
