"""Holds an example of each object of the API, from which the examples of the operations are put together."""

from typing import Any

from graftwork import __version__

Json = dict[str, Any]

CREATED_AT = 1_767_225_600
DIGEST = "sha256:" + "b" * 64
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PROMPT_TOKENS: Json = {
    "cached_tokens": 16,
    "device_tokens": 16,
    "host_tokens": 0,
    "disk_tokens": 0,
    "recomputed_tokens": 8,
}
USAGE: Json = {
    "prompt_tokens": 24,
    "completion_tokens": 6,
    "total_tokens": 30,
    "prompt_tokens_details": PROMPT_TOKENS,
    "completion_tokens_details": {"drafted_tokens": 4, "accepted_tokens": 3, "forced_tokens": 0},
}
MODEL: Json = {
    "id": "assistant",
    "object": "model",
    "created": 0,
    "owned_by": "graftwork",
    "max_model_len": 4096,
    "root": "assistant",
    "parent": None,
}
MODES: Json = {
    "object": "modes",
    "max_output_tokens": 256,
    "suspend_drafts": False,
    "refuse_flex": True,
    "changed_at": float(CREATED_AT),
}
TENANT: Json = {
    "id": "ten_01hzx",
    "object": "tenant",
    "name": "Acme",
    "status": "active",
    "weight": 1.0,
    "service_tier_ceiling": "default",
    "organisation_id": None,
    "created_at": CREATED_AT,
}
ORGANISATION: Json = {"id": "org_01hzx", "object": "organisation", "name": "Acme Group", "created_at": CREATED_AT}
WEBHOOK: Json = {
    "id": "whk_01hzx",
    "object": "webhook",
    "owner_id": "ten_01hzx",
    "url": "https://hooks.example.com/budgets",
    "created_at": CREATED_AT,
}
QUOTA: Json = {
    "requests_per_minute": 60,
    "tokens_per_minute": None,
    "max_concurrent_requests": None,
    "max_adapters": None,
    "max_adapter_bytes": None,
    "max_adapter_rank": None,
    "max_sessions": 100,
    "max_device_kv_bytes": None,
    "max_host_kv_bytes": None,
    "max_file_bytes": None,
    "monthly_tokens": None,
    "monthly_budget": None,
    "soft_budget": None,
    "currency": None,
}
USED: Json = {
    "used": {
        "sessions": 3,
        "adapters": 2,
        "adapter_bytes": 1048576,
        "monthly_tokens": 120000,
        "monthly_costs": [{"amount": "1.25", "currency": "USD"}],
    }
}
ORGANISATION_QUOTA: Json = QUOTA | {
    "requests_per_minute": None,
    "max_sessions": None,
    "monthly_budget": "1000",
    "soft_budget": "800",
    "currency": "USD",
}
MESSAGE_ITEM: Json = {
    "id": "msg_01hzx",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "It is sunny.", "annotations": []}],
}
INPUT_ITEM: Json = {
    "id": "item_01hzx",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "How is the weather?"}],
}
SESSION: Json = {
    "id": "ses_01hzx",
    "object": "session",
    "status": "idle",
    "model": {"name": "support", "version": 1, "digest": DIGEST},
    "head": "ckp_01hzx",
    "created_at": float(CREATED_AT),
    "updated_at": float(CREATED_AT),
    "closed_at": None,
    "forked_from": None,
    "running_turn": None,
    "awaiting": [],
    "last_seq": 3,
    "instructions": "Be brief.",
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": None,
    "sampling": {"temperature": 0},
    "metadata": {},
    "retention": {"ttl_s": 86400.0},
}
MONEY: Json = {"amount": "0.00002", "currency": "USD"}
TURN: Json = {
    "id": "turn_01hzx",
    "object": "turn",
    "session_id": "ses_01hzx",
    "status": "completed",
    "output": [MESSAGE_ITEM],
    "tool_calls": [],
    "checkpoint_id": "ckp_01hzx",
    "finish_reason": "stop",
    "usage": USAGE | {"kv_byte_seconds": 98304, "adapter_bytes": 0, "engine_ms": 41.5, "cost": MONEY},
    "cache": PROMPT_TOKENS | {"miss_reason": None},
    "error": None,
    "made_with": None,
    "service_tier": "default",
    "created_at": float(CREATED_AT),
    "finished_at": float(CREATED_AT),
}
RESPONSE: Json = {
    "id": "resp_01hzx",
    "object": "response",
    "created_at": CREATED_AT,
    "completed_at": CREATED_AT,
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
    "output": [MESSAGE_ITEM],
    "usage": {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 30,
    },
}
CONVERSATION: Json = {"id": "conv_01hzx", "object": "conversation", "created_at": CREATED_AT, "metadata": {}}
HEAD: Json = {
    "created": CREATED_AT,
    "model": "assistant",
    "service_tier": "default",
    "system_fingerprint": "fp_bbbbbbbbbbbb",
}
QUESTION: list[Json] = [{"role": "user", "content": "How is the weather?"}]


def list_of(*entries: Json, has_ids: bool = True) -> Json:
    """Returns one whole page of a list. `has_ids` is False where the entries have no `id`."""
    ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if has_ids else {}
    return {"object": "list", "data": [*entries], "has_more": False, "first_id": None, "last_id": None} | ends


_RATES: Json = {"requests_per_s": 0.5, "prompt_tokens_per_s": 412.0, "generated_tokens_per_s": 38.2}
_TTFT: Json = {"p50": 84.1, "p99": 410.7}
OVERVIEW: Json = {
    "object": "overview",
    "sequence": 17,
    "at": CREATED_AT + 0.5,
    "window_s": 300,
    "version": __version__,
    "model": "assistant",
    "sort": "activity",
    "totals": {
        "tenants": 1,
        "adapters": 1,
        "sessions": 1,
        "running": 2,
        "waiting": 1,
        **_RATES,
        "refused_per_s": 0.0,
    },
    "engines": [],
    "tenants": [
        {
            "id": "ten_01hzx",
            "name": "Acme",
            "status": "active",
            "running": 2,
            "waiting": 1,
            **_RATES,
            "ttft_ms": _TTFT,
            "inter_token_p99_ms": 24.0,
            "refusals": {"rate_limited": 3},
            "failures": {},
            "weight": 1.0,
            "fair_share": None,
            "service_share": None,
            "service_tiers": {"default": 141, "flex": 9},
            "prompt_tokens_by_tier": {"device": 90210, "host": 4096, "recomputed": 12000},
            "slo_burn": 0.4,
            "active_at": CREATED_AT,
        }
    ],
    "adapters": [
        {
            "tenant_id": "ten_01hzx",
            "name": "support",
            "version": 3,
            "residency": "device",
            "device": [],
            "host": [],
            "size_bytes": 1048576,
            "running": 2,
            "waiting": 0,
            "requests_per_s": 0.5,
            "ttft_ms": _TTFT,
            "active_at": CREATED_AT,
        }
    ],
    "sessions": [
        {
            "id": "ses_01hzx",
            "tenant_id": "ten_01hzx",
            "model": "support@3",
            "status": "running",
            "tokens": 2304,
            "prompt_tokens_by_tier": {"device": 2176, "host": 0, "disk": 0, "recomputed": 96},
            "miss_reason": None,
            "turns": 7,
            "active_at": CREATED_AT,
        }
    ],
}
"""A tenant's own overview. The operator's has engines, and all tenants."""
SERVER_OVERVIEW: Json = OVERVIEW | {
    "engines": [
        {
            "id": "engine-0",
            "status": "ready",
            "epoch": None,
            "address": "unix:/var/lib/graftwork/engine.sock",
            "version": __version__,
            "running": 2,
            "waiting": 1,
            "queued_tokens": 812,
            "pages": {
                "device": {"used": 640, "free": 1408},
                "host": {"used": 900, "free": 1148},
                "disk": {"used": 5120, "free": None},
            },
            "prompt_tokens_per_s": 412.0,
            "generated_tokens_per_s": 38.2,
            "step_ms": 9.75,
            "adapters_resident": 1,
        }
    ]
}

TIMELINE: Json = {
    "id": "req_01hzx",
    "object": "request.timeline",
    "client_request_id": None,
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "gateway_id": "gateway_01hzx",
    "tenant_id": "ten_01hzx",
    "key_id": "key_01hzx",
    "session_id": None,
    "turn_id": None,
    "method": "POST",
    "path": "/v1/chat/completions",
    "model": "support",
    "adapter": "support@1",
    "status": "completed",
    "http_status": 200,
    "created_at": float(CREATED_AT),
    "total_ms": 98.0,
    "traced": True,
    "stages": [
        {"name": name, "start_ms": start_ms, "duration_ms": duration_ms}
        for name, start_ms, duration_ms in (
            ("authenticate", 0.0, 0.4),
            ("body", 0.4, 0.6),
            ("prepare", 1.0, 0.2),
            ("encode", 1.2, 0.8),
            ("quota", 2.0, 0.3),
            ("start", 2.3, 0.7),
            ("queue", 3.0, 21.0),
            ("prefill", 24.0, 26.0),
            ("decode", 50.0, 46.0),
            ("finish", 96.0, 2.0),
        )
    ],
    "generations": [
        {
            "id": "req_01hzx.0",
            "sent_ms": 3.0,
            "admitted_ms": 24.0,
            "first_token_ms": 50.0,
            "ended_ms": 96.0,
            "prompt": {"device": 16, "host": 0, "disk": 0, "recomputed": 8, "miss_reason": "never_cached"},
            "completion_tokens": 6,
            "drafted_tokens": 4,
            "accepted_tokens": 3,
            "detokenise_ms": 0.21,
            "detokenise_calls": 4,
            "engines": [
                {
                    "start_ms": 3.5,
                    "spans": [
                        {"name": "adapter_load", "inside": "queue", "start_ms": 3.6, "duration_ms": 19.4},
                        {"name": "queue", "start_ms": 3.5, "duration_ms": 20.0},
                        {
                            "name": "prefill",
                            "start_ms": 23.5,
                            "duration_ms": 26.0,
                            "steps": 1,
                            "busy_ms": 25.8,
                            "tokens": 8,
                            "batch_requests": 3.0,
                            "batch_tokens": 10.0,
                        },
                        {
                            "name": "decode",
                            "start_ms": 49.5,
                            "duration_ms": 46.0,
                            "steps": 3,
                            "busy_ms": 45.1,
                            "tokens": 5,
                            "batch_requests": 2.67,
                            "batch_tokens": 6.67,
                            "drafted": 4,
                            "accepted": 3,
                            "masks": 7,
                            "mask_ms": 0.31,
                            "draft_ms": 0.12,
                        },
                    ],
                }
            ],
        }
    ],
    "write_ms": 0.3,
    "writes": 6,
}
TRACE_SWITCH: Json = {
    "id": "ten_01hzx",
    "object": "trace_switch",
    "token_ids": False,
    "changed_at": float(CREATED_AT),
}
