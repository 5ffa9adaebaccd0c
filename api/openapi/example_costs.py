"""Holds the examples of usage, price lists and invoices for the OpenAPI document."""

from graftwork.api.openapi.example_objects import CREATED_AT, MONEY, Json, list_of

USAGE_TOTALS: Json = {
    "requests": 1,
    "prompt_tokens": 24,
    "cached_tokens": 16,
    "device_tokens": 16,
    "host_tokens": 0,
    "disk_tokens": 0,
    "completion_tokens": 6,
    "total_tokens": 30,
    "kv_byte_seconds": 98304,
    "adapter_bytes": 0,
    "drafted_tokens": 4,
    "forced_tokens": 0,
    "reasoning_tokens": 0,
    "engine_ms": 41.5,
    "costs": [MONEY],
}
USAGE_ROWS = list_of({"group": "2026-01-01"} | USAGE_TOTALS, has_ids=False)
PRICE_LIST: Json = {
    "id": "prc_01hzx",
    "object": "price_list",
    "tenant_id": None,
    "service_tier": None,
    "currency": "USD",
    "rates": {
        "input": "0.5",
        "output": "2",
        "input_device": "0.25",
        "input_host": "0.25",
        "input_disk": "0.5",
        "kv_gb_hour": "0",
        "adapter_gb": "0",
    },
    "valid_from": float(CREATED_AT),
    "created_at": float(CREATED_AT),
    "in_force": True,
}
INVOICE: Json = {
    "object": "invoice",
    "tenant_id": "ten_01hzx",
    "month": "2026-01",
    "start": 1767225600.0,
    "end": 1769904000.0,
    "is_final": True,
    "lines": [
        {
            "price_list": "prc_01hzx",
            "item": "input",
            "quantity": 8,
            "unit": "token",
            "rate": "0.5",
            "amount": "0.000004",
            "currency": "USD",
        }
    ],
    "totals": [{"amount": "0.000004", "currency": "USD"}],
    "requests": 1,
    "unpriced": USAGE_TOTALS | {"requests": 0, "costs": []},
}
_COUNTED: Json = {"prompt_tokens": 24, "completion_tokens": 6, "kv_byte_seconds": 98304}
USAGE_CHECK: Json = {
    "object": "usage.check",
    "start": float(CREATED_AT),
    "end": float(CREATED_AT) + 86400.0,
    "differences": 0,
    "compared": [
        {
            "verdict": "agrees",
            "is_difference": False,
            "requests": 1,
            "billed": _COUNTED,
            "unbilled": {"prompt_tokens": 0, "completion_tokens": 0},
            "reported": _COUNTED,
            "examples": [],
        }
    ],
    "sums": [],
    "engines": [{"replica_id": "engine-0", "prompt_tokens": 24, "generated_tokens": 6}],
    "journal": {"open": 2, "waiting": 0},
}
