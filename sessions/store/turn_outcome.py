"""Says how a turn ended, and what that makes of the turn and its session.

Owns no rows: `turn_store.py` stores what is said here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftwork.platform.errors import GraftworkError, Unavailable
from graftwork.sessions.core.events import EventDraft, EventType
from graftwork.sessions.core.items import Item, open_calls
from graftwork.sessions.core.session import AgentSession, LedgerCall, Turn, TurnStatus
from graftwork.sessions.core.transcript import Checkpoint

NO_DEADLINES: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """How a turn ended: its status, and what it added to the session.

    `drafts` holds the events of the turn that are not stored yet. The last of them is the turn's last event.
    """

    status: TurnStatus
    drafts: Sequence[EventDraft]
    checkpoint: Checkpoint | None = None
    """The checkpoint that the turn made, which becomes the session's latest one.

    It is None if the turn made no checkpoint.
    """
    items: Sequence[Item] = ()
    """The items of the checkpoint: the turn's input, then the answer."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """The time at which the output of each tool is expected, in Unix seconds, by the tool's name."""
    after_seq: int | None = None
    """The number of the event before the first draft; None means the last stored event."""


def ledger_of(
    checkpoint: Checkpoint, items: Sequence[Item], deadlines: Mapping[str, float] = NO_DEADLINES
) -> tuple[LedgerCall, ...]:
    """Returns the tool calls at the end of a checkpoint, all without outputs.

    `items` are at least the items from the oldest of these calls on. `deadlines` maps the name of a tool to the time at which its
    output is expected, in Unix seconds.
    """
    if not checkpoint.awaits_tools:
        return ()
    return tuple(
        LedgerCall(
            checkpoint_id=checkpoint.checkpoint_id,
            position=position,
            call_id=call.call_id,
            name=call.tool_name,
            arguments=call.arguments,
            deadline_at=deadlines.get(call.tool_name),
        )
        for position, call in enumerate(open_calls(items))
    )


def ended(turn: Turn, outcome: TurnOutcome, now: float) -> Turn:
    """Returns a turn as it is at its end."""
    return replace(
        turn,
        status=outcome.status,
        checkpoint_id=None if outcome.checkpoint is None else outcome.checkpoint.checkpoint_id,
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        cache=outcome.cache,
        error=outcome.error,
        finished_at=now,
    )


def at_rest(session: AgentSession, outcome: TurnOutcome, last_seq: int, now: float) -> AgentSession:
    """Returns a session as it is after a turn. `last_seq` is the number of its last event."""
    return replace(
        session,
        status=session.resting_status,
        running_turn_id=None,
        lease_owner=None,
        lease_expires_at=None,
        cancel_requested=False,
        last_seq=last_seq,
        last_cache=session.last_cache if outcome.cache is None else outcome.cache,
        updated_at=now,
    )


def failure_event(error: GraftworkError) -> EventDraft:
    """Returns the last event of a turn that failed with `error`. The event has no number yet."""
    return EventDraft(EventType.TURN_FAILED, {"error": error.body()["error"]})


def interrupted_error() -> Unavailable:
    """Returns the error that clients get for a turn whose process has stopped before the turn's end."""
    return Unavailable(
        "The server that ran the turn stopped; the session is as it was before the turn: send the turn, or the tool "
        "outputs, again.",
        code="turn_interrupted",
        retry_after_s=0.0,
    )
