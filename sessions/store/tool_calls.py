"""Finds the tool calls of a session and stores their outputs.

Runs in the caller's transaction, and never opens or commits one. Knows which errors a client gets for a call that the
session did not make, or for a call that is not at the session's latest checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.errors import Conflict, GraftworkError, NotFound
from graftwork.platform.ids import CallId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.session import AgentSession, LedgerCall, SessionStatus, ToolOutput
from graftwork.sessions.store import session_rows, turn_rows


@dataclass(frozen=True, slots=True)
class AcceptedOutputs:
    """The result of storing tool outputs: the stored outputs, and the session as it is after this."""

    session: AgentSession
    outputs: tuple[ToolOutput, ...]
    """The stored outputs of the calls that the request names, in the order of the request."""
    concerns_head: bool
    """Whether one of the outputs is for a tool call at the end of the latest checkpoint."""
    turn_id: TurnId | None
    """The latest turn that used one of the outputs; None if no turn has used one."""

    @property
    def may_continue(self) -> bool:
        """Whether the session's next turn may start with these outputs.

        It may start if every tool call at the session's latest checkpoint has an output, one of the given outputs is
        for these calls, and no turn runs.
        """
        waits = self.session.status in (SessionStatus.AWAITING_TOOL, SessionStatus.SUSPENDED)
        return waits and self.concerns_head and not self.session.awaited_call_ids


async def known_calls(
    database: ReadSession, scope: TenantScope, session: AgentSession, call_ids: Sequence[CallId]
) -> dict[CallId, LedgerCall]:
    """Finds the tool calls with these ids, at the session's latest checkpoint and at its earlier ones."""
    earlier = await session_rows.find_answered_calls(database, scope, session.session_id, call_ids)
    named = (call for call in session.ledger if call.call_id in call_ids)
    return {call.call_id: call for call in [*earlier, *named]}


async def stored_outputs(
    database: ReadSession,
    scope: TenantScope,
    session: AgentSession,
    calls: Mapping[CallId, LedgerCall],
    call_ids: Sequence[CallId],
) -> dict[CallId, str | None]:
    """Returns the output of each call; None for a call without one. Also reads the history before a fork.

    Raises NotFound or Conflict.
    """
    stored = {call.call_id: call.output for call in calls.values()}
    if session.origin_id is not None and not stored.keys() >= set(call_ids):
        inherited = await turn_rows.find_outputs(database, scope, session.origin_id)
        stored = {item.call_id: item.body["output"] for item in inherited} | stored
    for call_id in call_ids:
        if call_id not in stored:
            raise _unknown_call(session, call_id)
    return stored


async def save_output(
    database: WriteSession,
    scope: TenantScope,
    session: AgentSession,
    call: LedgerCall,
    given: ToolOutput,
    now: float,
) -> None:
    """Stores the output of a tool call of the session's latest checkpoint. Raises Conflict for an earlier call."""
    if call.checkpoint_id != session.head_id:
        raise Conflict(
            f"The session has moved away from the call {call.call_id}: rewind to its checkpoint to answer it.",
            param="outputs",
            code="call_not_awaited",
            details={"call_id": call.call_id, "head": session.head_id},
        )
    await session_rows.save_output(database, scope, session.session_id, call, given.output, now)


def _unknown_call(session: AgentSession, call_id: CallId) -> GraftworkError:
    """Returns the error for an output whose call is not in the session."""
    if not session.ledger:
        return Conflict(
            f"The session awaits no tool output, and made no call {call_id}: read its items to see where it stands.",
            param="outputs",
            code="awaits_no_tool",
            details={"head": session.head_id},
        )
    return NotFound(f"The session made no call {call_id}.", param="outputs", code="call_not_found")
