"""The outputs of a session's tool calls: taken in any order and any number of times, and gone on with once all are there.

Owns when the turn that takes them starts; that each is stored once is the store's.
Never loses an output that was accepted: if its turn is refused or fails, the output stays, and starts another when it
is sent again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.engine.core.session_commands import ToolWait
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.ids import CallId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.items import function_call_output, parse_output
from graftwork.sessions.core.session import AgentSession, ToolOutput
from graftwork.sessions.store.session_store import AcceptedOutputs, SessionStore
from graftwork.sessions.turns.access import SessionAccess, may_be_id
from graftwork.sessions.turns.handle import RunningTurn
from graftwork.sessions.turns.kv import SessionKv
from graftwork.sessions.turns.launcher import SessionTurns
from graftwork.sessions.turns.settings import NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class ToolOutputsAnswer:
    """What is stored of a session's tool outputs, and what came of it."""

    session: AgentSession
    outputs: tuple[ToolOutput, ...]
    """Of the calls that were named, or of all that the head ends in."""
    missing: tuple[CallId, ...]
    """Calls that are still awaited."""
    turn: RunningTurn | None = None
    """The turn that goes on with them: started now, or earlier by the same outputs. None while calls are missing."""


class ToolAnswers:
    """Tool outputs of all tenants' sessions."""

    def __init__(self, access: SessionAccess, store: SessionStore, turns: SessionTurns, kv: SessionKv) -> None:
        self._access = access
        self._store = store
        self._turns = turns
        self._kv = kv

    async def read(self, principal: Principal, session_id: str) -> ToolOutputsAnswer:
        """What is stored for the calls that the head ends in. Raises NotFound."""
        session = await self._access.load(principal.scope(), session_id)
        stored = [ToolOutput(call.call_id, call.output) for call in session.ledger if call.output is not None]
        return ToolOutputsAnswer(session, tuple(stored), session.awaited_call_ids)

    async def send(
        self, principal: Principal, session_id: str, outputs: Sequence[Mapping[str, Any]]
    ) -> ToolOutputsAnswer:
        """Store outputs `{call_id, output}`; the last missing one starts the next turn.

        Raises NotFound, Conflict; LimitExceeded, ContextLengthExceeded, CapacityAbsent if the turn is refused.
        """
        scope, given = principal.scope(), _tool_outputs(outputs)
        session = await self._access.load(scope, session_id)
        accepted = await self._store.accept_outputs(scope, session.session_id, given)
        if accepted.may_continue:
            try:
                turn = await self._continue(principal, accepted.session)
                return ToolOutputsAnswer(accepted.session, accepted.outputs, (), turn)
            except Conflict:
                # Another request with the same outputs was faster, or the session was rewound: look again.
                accepted = await self._store.accept_outputs(scope, session.session_id, given)
                if accepted.may_continue:
                    raise
        earlier = None if accepted.turn_id is None else await self._turns.find(scope, accepted.turn_id)
        if earlier is None:
            await self._prefetch(principal, accepted, given)
        return ToolOutputsAnswer(accepted.session, accepted.outputs, accepted.session.awaited_call_ids, earlier)

    async def _continue(self, principal: Principal, session: AgentSession) -> RunningTurn:
        """Go on with the answers to all calls at the head, in the order of the calls."""
        answers = [function_call_output(call.call_id, call.output or "") for call in session.ledger]
        return await self._turns.launch(principal, session, answers, NO_OVERRIDES.over(session.settings))

    async def _prefetch(self, principal: Principal, accepted: AcceptedOutputs, given: Sequence[ToolOutput]) -> None:
        """Some tools have answered: the rest may follow soon."""
        session = accepted.session
        if session.awaited_call_ids:
            names = {call.call_id: call.name for call in session.ledger}
            answered = [ToolWait(names[output.call_id]) for output in given if output.call_id in names]
            await self._kv.prefetch(await self._access.history(principal, session), answered)


def _tool_outputs(outputs: Sequence[Mapping[str, Any]]) -> list[ToolOutput]:
    if not outputs:
        raise ValidationFailed("outputs must have at least one entry.", param="outputs")
    return [_tool_output(entry, f"outputs[{index}]") for index, entry in enumerate(outputs)]


def _tool_output(entry: Mapping[str, Any], param: str) -> ToolOutput:
    call_id = entry.get("call_id")
    if not isinstance(call_id, str):
        raise ValidationFailed(f"{param}.call_id must be a text.", param=f"{param}.call_id")
    if not may_be_id(call_id):
        raise NotFound("The session made no such call.", param=f"{param}.call_id", code="call_not_found")
    if "output" not in entry:
        raise ValidationFailed(f"{param}.output is missing.", param=f"{param}.output")
    return ToolOutput(CallId(call_id), parse_output(entry["output"], f"{param}.output"))
