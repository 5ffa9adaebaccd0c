"""Makes the JSON bodies of sessions and turns, with their token counts and cache figures.

Owns these bodies for all routes and events in which they appear. Never computes new figures.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.engine.core.session_commands import SessionMemory
from graftwork.platform.answers import sessions as answers
from graftwork.platform.answers import usage as figures
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.ids import CallId, CheckpointId
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import AgentSession, ToolOutput, Turn, TurnStatus


def session_answer(
    session: AgentSession, base_name: str, usage: figures.UsageTotals | None = None
) -> answers.SessionState:
    """Returns the JSON body that describes a session to clients.

    `base_name` is the name of the base model. The body shows it if the session uses no adapter. `usage` is what the
    session has used; None leaves it out.
    """
    return answers.SessionState(**_session_fields(session, base_name), usage=usage)


def session_change_answer(
    session: AgentSession, base_name: str, given_up_tokens: int, given_up_bytes: int | None
) -> answers.ChangedSession:
    """Returns the JSON body that answers a change of a session.

    `base_name` is the name of the base model. The body shows it if the session uses no adapter.
    `given_up_tokens` and `given_up_bytes` are the size of the KV that the session's new adapter version cannot use.
    `given_up_bytes` is None if the engine did not answer.
    """
    given_up = answers.GivenUpKv(tokens=given_up_tokens, bytes=given_up_bytes)
    return answers.ChangedSession(**_session_fields(session, base_name), kv_given_up=given_up)


def _session_fields(session: AgentSession, base_name: str) -> dict[str, Any]:
    settings = session.settings
    return {
        "id": session.session_id,
        "status": session.status.value,
        "model": _pinned_model(session, base_name),
        "head": session.head_id,
        "created_at": session.created_at,
        "updated_at": session.updated_at,
        "closed_at": session.closed_at,
        "forked_from": session.forked_from,
        "running_turn": session.running_turn_id,
        "awaiting": session.awaited_call_ids,
        "last_seq": session.last_seq,
        "instructions": settings.instructions,
        "tools": settings.tools,
        "tool_choice": settings.tool_choice,
        "parallel_tool_calls": settings.parallel_tool_calls,
        "response_format": settings.response_format,
        "sampling": dict(settings.sampling),
        "metadata": dict(session.metadata),
        "retention": answers.Retention(ttl_s=session.retention_s),
    }


def _pinned_model(session: AgentSession, base_name: str) -> answers.PinnedModel:
    version = session.model.version
    if version is None:
        return answers.PinnedModel(name=base_name, version=None, digest=None)
    return answers.PinnedModel(name=version.name, version=version.version, digest=version.digest)


def turn_answer(turn: Turn) -> answers.Turn:
    """Returns the JSON body that describes a turn to clients."""
    return answers.Turn(
        id=turn.turn_id,
        session_id=turn.session_id,
        status=turn.status.value,
        output=tuple(item_answer(item) for item in turn.output),
        tool_calls=tuple(_pending_call(item) for item in awaited_calls(turn)),
        checkpoint_id=turn.checkpoint_id,
        finish_reason=turn.finish_reason,
        usage=None if turn.usage is None else figures.TurnUsage.read(turn.usage),
        cache=None if turn.cache is None else figures.CacheReport.read(turn.cache),
        error=cast(ErrorFields | None, turn.error),
        made_with=None if turn.made_with is None else dict(turn.made_with),
        service_tier=turn.service_tier,
        created_at=turn.created_at,
        finished_at=turn.finished_at,
    )


def item_answer(item: Item) -> answers.Item:
    """Returns the JSON body that describes an item of a history to clients."""
    return answers.Item.read(item.body)


def awaited_calls(turn: Turn) -> list[Item]:
    """Returns the tool calls of a turn that need an output. A call that the token limit cut off needs no output."""
    if turn.status is not TurnStatus.AWAITING_TOOL:
        return []
    return [item for item in turn.output if item.is_call]


def _pending_call(item: Item) -> answers.PendingCall:
    return answers.PendingCall(call_id=item.call_id, name=item.tool_name, arguments=item.arguments)


def given_outputs_answer(
    session: AgentSession, outputs: Sequence[ToolOutput], missing: Collection[CallId]
) -> answers.GivenOutputs:
    """Returns the JSON body that shows which outputs of a session's tool calls are stored, and which are missing.

    `missing` has the ids of the tool calls without an output.
    """
    return answers.GivenOutputs(
        session_id=session.session_id,
        status=session.status.value,
        outputs=tuple(answers.StoredOutput(call_id=each.call_id, output=each.output) for each in outputs),
        tool_calls=tuple(
            answers.AwaitedCall(
                call_id=call.call_id, name=call.name, arguments=call.arguments, deadline_at=call.deadline_at
            )
            for call in session.ledger
            if call.call_id in missing
        ),
    )


def cache_body(cache: CacheReport) -> dict[str, Any]:
    """Returns how many prompt tokens had their KV on each cache tier, and the reason for a cache miss, as JSON."""
    reason = None if cache.miss_reason is None else cache.miss_reason.value
    return figures.CacheReport(**_prompt_tokens(cache), miss_reason=reason).body()


def usage_body(
    cache: CacheReport, completion_tokens: int, drafts: DraftReport, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Returns the token counts of one request as the JSON object `usage`, for the database and for clients."""
    return figures.Usage(
        prompt_tokens=cache.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=cache.prompt_tokens + completion_tokens,
        prompt_tokens_details=figures.PromptTokensDetails(**_prompt_tokens(cache)),
        completion_tokens_details=completion_details(drafts, reasoning_tokens),
    ).body()


def turn_usage_body(
    tokens: Mapping[str, Any], engine: tuple[int, int, int], cost: figures.Money | None
) -> dict[str, Any]:
    """Returns the JSON object `usage` of a turn: `tokens` as of any request, what it took of the `engine` (byte-seconds of
    KV, bytes of adapters, microseconds), and its cost if it has a price.
    """
    kv_byte_seconds, adapter_bytes, engine_us = engine
    taken = {"kv_byte_seconds": kv_byte_seconds, "adapter_bytes": adapter_bytes, "engine_ms": engine_us / 1000}
    return {**tokens, **taken, "cost": None if cost is None else cost.body()}


def _prompt_tokens(cache: CacheReport) -> dict[str, int]:
    return {
        "cached_tokens": cache.cached_tokens,
        "device_tokens": cache.device_tokens,
        "host_tokens": cache.host_tokens,
        "disk_tokens": cache.disk_tokens,
        "recomputed_tokens": cache.recomputed_tokens,
    }


def completion_details(drafts: DraftReport, reasoning_tokens: int = 0) -> figures.CompletionTokensDetails:
    """Returns the counts of draft tokens of one answer, and of its reasoning if it has any.

    A client can send a prediction of the answer, whose tokens then serve as draft tokens. The counts of this prediction
    are None if the model neither accepted nor rejected one of its tokens.
    """
    was_predicted = bool(drafts.accepted_prediction_tokens or drafts.rejected_prediction_tokens)
    return figures.CompletionTokensDetails(
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=drafts.accepted_tokens,
        forced_tokens=drafts.forced_tokens,
        accepted_prediction_tokens=drafts.accepted_prediction_tokens if was_predicted else None,
        rejected_prediction_tokens=drafts.rejected_prediction_tokens if was_predicted else None,
        reasoning_tokens=reasoning_tokens or None,
    )


def lease_answer(memory: SessionMemory | None, now: float) -> answers.Lease | None:
    """Returns how long the engine keeps a session's KV pages on the device while tools run. `now` is in Unix seconds.

    Returns None if the engine did not promise a time.
    """
    if memory is None or memory.lease_s is None:
        return None
    return answers.Lease(tier="device", seconds=round(memory.lease_s, 3), until=now + memory.lease_s)


def session_cache_answer(session: AgentSession, memory: SessionMemory | None, now: float) -> answers.SessionCache:
    """Returns how many tokens and bytes of a session's history are on each cache tier. `now` is in Unix seconds.

    Each token counts once, on the fastest tier that has it. Bytes count on every tier that has a copy. If `memory` is
    None (the engine did not answer), the token counts are those of the last turn.
    """
    last: Mapping[str, Any] = session.last_cache or {}
    if memory is None:
        tiers = {
            tier: answers.TierUse(tokens=last.get(f"{tier}_tokens", 0), bytes=None)
            for tier in ("device", "host", "disk")
        }
    else:
        tiers = {
            "device": answers.TierUse(tokens=memory.device_tokens, bytes=memory.device_bytes),
            "host": answers.TierUse(tokens=memory.host_tokens, bytes=memory.host_bytes),
            "disk": answers.TierUse(tokens=memory.disk_tokens, bytes=memory.disk_bytes),
        }
    return answers.SessionCache(
        session_id=session.session_id,
        tiers=tiers,
        missing_tokens=None if memory is None else memory.missing_tokens,
        recomputed_tokens=last.get("recomputed_tokens", 0),
        lease=lease_answer(memory, now),
        last_miss_reason=last.get("miss_reason"),
    )


def prefetch_answer(session: AgentSession, num_tokens: int, memory: SessionMemory | None) -> answers.Prefetch:
    """Returns the JSON body that describes the result of a prefetch, which loads a session's KV to the device.

    `num_tokens` is the number of tokens in the session's history. `memory` is None if the engine did not answer.
    """
    held = 0 if memory is None else memory.device_tokens + memory.host_tokens + memory.disk_tokens
    return answers.Prefetch(
        session_id=session.session_id,
        history_tokens=num_tokens,
        prefetched_tokens=held,
        missing_tokens=num_tokens if memory is None else memory.missing_tokens,
    )


def completed_fields(checkpoint_id: CheckpointId, usage: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
    """Returns the fields of the event `turn.completed`, which ends a turn that awaits no tool outputs."""
    return {"checkpoint_id": checkpoint_id, "usage": usage, "finish_reason": finish_reason}


def awaiting_fields(
    checkpoint_id: CheckpointId, usage: Mapping[str, Any], call_ids: list[str], lease: answers.Lease | None
) -> dict[str, Any]:
    """Returns the fields of the event `turn.awaiting_tool`, which ends a turn that awaits tool outputs.

    `call_ids` are the ids of the tool calls that need an output. `lease` says how long the KV stays on the device.
    """
    told = None if lease is None else lease.body()
    return {"call_ids": call_ids, "lease": told, "checkpoint_id": checkpoint_id, "usage": usage}
