"""The JSON bodies of sessions, turns and their figures.

Owns these shapes for every route and event that carries them. Never computes new figures.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.engine.core.session_commands import SessionMemory
from graftwork.platform.ids import CheckpointId
from graftwork.sessions.core.items import Item, ItemType
from graftwork.sessions.core.session import AgentSession, ToolOutput, Turn, TurnStatus


def session_body(session: AgentSession, base_name: str) -> dict[str, Any]:
    """The body of a session."""
    settings = session.settings
    return {
        "id": session.session_id,
        "object": "session",
        "status": session.status.value,
        "model": model_body(session, base_name),
        "head": session.head_id,
        "created_at": session.created_at,
        "updated_at": session.updated_at,
        "closed_at": session.closed_at,
        "forked_from": session.forked_from,
        "running_turn": session.running_turn_id,
        "awaiting": list(session.awaited_call_ids),
        "last_seq": session.last_seq,
        "instructions": settings.instructions,
        "tools": list(settings.tools),
        "tool_choice": settings.tool_choice,
        "parallel_tool_calls": settings.parallel_tool_calls,
        "response_format": settings.response_format,
        "sampling": dict(settings.sampling),
        "metadata": dict(session.metadata),
        "retention": {"ttl_s": session.retention_s},
    }


def model_body(session: AgentSession, base_name: str) -> dict[str, Any]:
    """The body of the adapter version that a session is pinned to, or of the base model."""
    version = session.model.version
    if version is None:
        return {"name": base_name, "version": None, "digest": None}
    return {"name": version.name, "version": version.version, "digest": version.digest}


def turn_body(turn: Turn) -> dict[str, Any]:
    """The body of a turn."""
    return {
        "id": turn.turn_id,
        "object": "turn",
        "session_id": turn.session_id,
        "status": turn.status.value,
        "output": [item.body for item in turn.output],
        "tool_calls": [tool_call_body(item) for item in awaited_calls(turn)],
        "checkpoint_id": turn.checkpoint_id,
        "finish_reason": turn.finish_reason,
        "usage": turn.usage,
        "cache": turn.cache,
        "error": turn.error,
        "made_with": turn.made_with,
        "created_at": turn.created_at,
        "finished_at": turn.finished_at,
    }


def awaited_calls(turn: Turn) -> list[Item]:
    """The calls at the end of a turn that need an output. A call that the token limit cut off needs none."""
    if turn.status is not TurnStatus.AWAITING_TOOL:
        return []
    return [item for item in turn.output if item.type is ItemType.FUNCTION_CALL]


def tool_call_body(item: Item) -> dict[str, Any]:
    return {field: item.body[field] for field in ("call_id", "name", "arguments")}


def tool_output_body(output: ToolOutput) -> dict[str, Any]:
    return {"call_id": output.call_id, "output": output.output}


def cache_body(cache: CacheReport) -> dict[str, Any]:
    """The body of a prompt's cache report: its tokens by tier."""
    return {
        "cached_tokens": cache.cached_tokens,
        "device_tokens": cache.device_tokens,
        "host_tokens": cache.host_tokens,
        "disk_tokens": cache.disk_tokens,
        "recomputed_tokens": cache.recomputed_tokens,
        "miss_reason": None if cache.miss_reason is None else cache.miss_reason.value,
    }


def usage_body(cache: CacheReport, completion_tokens: int, drafts: DraftReport) -> dict[str, Any]:
    """What a turn used."""
    tiers = cache_body(cache)
    del tiers["miss_reason"]
    return {
        "prompt_tokens": cache.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": cache.prompt_tokens + completion_tokens,
        "prompt_tokens_details": tiers,
        "completion_tokens_details": draft_body(drafts),
    }


def draft_body(drafts: DraftReport) -> dict[str, int]:
    """How an answer's tokens were found; OpenAI's own two figures only where the client predicted something."""
    body = {
        "drafted_tokens": drafts.drafted_tokens,
        "accepted_tokens": drafts.accepted_tokens,
        "forced_tokens": drafts.forced_tokens,
    }
    if drafts.accepted_prediction_tokens or drafts.rejected_prediction_tokens:
        body["accepted_prediction_tokens"] = drafts.accepted_prediction_tokens
        body["rejected_prediction_tokens"] = drafts.rejected_prediction_tokens
    return body


def lease_body(memory: SessionMemory | None, now: float) -> dict[str, Any] | None:
    """The body of a lease: how long the device keeps a session's pages. None without a lease."""
    if memory is None or memory.lease_s is None:
        return None
    return {"tier": "device", "seconds": round(memory.lease_s, 3), "until": now + memory.lease_s}


def session_cache_body(session: AgentSession, memory: SessionMemory | None, now: float) -> dict[str, Any]:
    """The body of a session's cache: its tokens and bytes by tier. Bytes are null if the engine does not answer.

    A token counts on the nearest tier that has it; bytes count on every tier that holds them.
    """
    last: Mapping[str, Any] = session.last_cache or {}
    tiers = {tier: {"tokens": last.get(f"{tier}_tokens", 0), "bytes": None} for tier in ("device", "host", "disk")}
    if memory is not None:
        tiers = {
            "device": {"tokens": memory.device_tokens, "bytes": memory.device_bytes},
            "host": {"tokens": memory.host_tokens, "bytes": memory.host_bytes},
            "disk": {"tokens": memory.disk_tokens, "bytes": memory.disk_bytes},
        }
    return {
        "object": "session.cache",
        "session_id": session.session_id,
        "tiers": tiers,
        "missing_tokens": None if memory is None else memory.missing_tokens,
        "recomputed_tokens": last.get("recomputed_tokens", 0),
        "lease": lease_body(memory, now),
        "last_miss_reason": last.get("miss_reason"),
    }


def session_change_body(
    session: AgentSession, base_name: str, given_up_tokens: int, given_up_bytes: int | None
) -> dict[str, Any]:
    """The body of a changed session, with the tokens and bytes of KV that the new adapter cannot use."""
    given_up = {"tokens": given_up_tokens, "bytes": given_up_bytes}
    return session_body(session, base_name) | {"kv_given_up": given_up}


def prefetch_body(session: AgentSession, num_tokens: int, memory: SessionMemory | None) -> dict[str, Any]:
    """The body of a prefetch: how many tokens are cached and how many are missing."""
    return {
        "object": "session.prefetch",
        "session_id": session.session_id,
        "history_tokens": num_tokens,
        "prefetched_tokens": 0 if memory is None else memory.device_tokens + memory.host_tokens + memory.disk_tokens,
        "missing_tokens": num_tokens if memory is None else memory.missing_tokens,
    }


def completed_fields(checkpoint_id: CheckpointId, usage: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
    """The fields of `turn.completed`."""
    return {"checkpoint_id": checkpoint_id, "usage": usage, "finish_reason": finish_reason}


def awaiting_fields(
    checkpoint_id: CheckpointId, usage: Mapping[str, Any], call_ids: list[str], lease: dict[str, Any] | None
) -> dict[str, Any]:
    """The fields of `turn.awaiting_tool`."""
    return {"call_ids": call_ids, "lease": lease, "checkpoint_id": checkpoint_id, "usage": usage}
