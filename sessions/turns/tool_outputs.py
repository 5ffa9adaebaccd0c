"""Stores the outputs of a session's tool calls, and starts the next turn once all outputs are stored.

Owns the decision when the next turn starts. Never runs a turn. A client may send the outputs in any order, and may send
an output again; each output is stored once.
Invariant: an accepted output is never lost. If the turn that uses the outputs is refused or fails, a client that sends
one of them again starts another turn.
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
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.tool_calls import AcceptedOutputs
from graftwork.sessions.turns.handle import TurnHandle, TurnReader
from graftwork.sessions.turns.kv import SessionKvClient
from graftwork.sessions.turns.launcher import TurnLauncher
from graftwork.sessions.turns.running import SessionLoader, may_be_id
from graftwork.sessions.turns.settings import NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class ToolOutputsResult:
    """The stored outputs of a session's tool calls, and the turn that uses these outputs."""

    session: AgentSession
    outputs: tuple[ToolOutput, ...]
    """The stored outputs of the calls that the request names.

    `ToolOutputs.read` returns those of all calls at the end of the latest checkpoint.
    """
    missing: tuple[CallId, ...]
    """The ids of the tool calls that have no output yet."""
    turn: TurnHandle | None = None
    """The turn that uses the outputs, started by this request or earlier.

    It is None while outputs are missing, and after `read`.
    """


class ToolOutputs:
    """Stores the outputs of tool calls that clients send, and starts the turns that use them, for all tenants."""

    def __init__(
        self,
        loader: SessionLoader,
        store: SessionStore,
        launcher: TurnLauncher,
        reader: TurnReader,
        kv: SessionKvClient,
    ) -> None:
        self._loader = loader
        self._store = store
        self._launcher = launcher
        self._reader = reader
        self._kv = kv

    async def read(self, principal: Principal, session_id: str) -> ToolOutputsResult:
        """Reads the stored outputs of the tool calls at the end of a session's latest checkpoint.

        Raises NotFound if the session does not exist.
        """
        session = await self._loader.load(principal.scope(), session_id)
        stored = [ToolOutput(call.call_id, call.output) for call in session.ledger if call.output is not None]
        return ToolOutputsResult(session, tuple(stored), session.awaited_call_ids)

    async def send(
        self, principal: Principal, session_id: str, outputs: Sequence[Mapping[str, Any]]
    ) -> ToolOutputsResult:
        """Stores outputs of tool calls. If then no output is missing, starts the session's next turn.

        Each of `outputs` has the fields `call_id` and `output`.
        Raises LimitExceeded, ContextLengthExceeded or Unavailable if the next turn cannot start; the outputs stay
        stored. Can also raise ValidationFailed, NotFound or Conflict.
        """
        scope, given = principal.scope(), _tool_outputs(outputs)
        session = await self._loader.load(scope, session_id)
        accepted = await self._store.accept_outputs(scope, session.session_id, given)
        if accepted.may_continue:
            try:
                turn = await self._continue(principal, accepted.session)
                return ToolOutputsResult(accepted.session, accepted.outputs, (), turn)
            except Conflict:
                # Another request with the same outputs was faster, or the session was rewound. Read the session again.
                accepted = await self._store.accept_outputs(scope, session.session_id, given)
                if accepted.may_continue:
                    raise
        earlier = None if accepted.turn_id is None else await self._reader.find(scope, accepted.turn_id)
        if earlier is None:
            await self._prefetch(principal, accepted, given)
        return ToolOutputsResult(accepted.session, accepted.outputs, accepted.session.awaited_call_ids, earlier)

    async def _continue(self, principal: Principal, session: AgentSession) -> TurnHandle:
        """Starts a turn with the outputs of the session's last tool calls, in the order of the calls."""
        answers = [function_call_output(call.call_id, call.output or "") for call in session.ledger]
        return await self._launcher.launch(principal, session, answers, NO_OVERRIDES.over(session.settings))

    async def _prefetch(self, principal: Principal, accepted: AcceptedOutputs, given: Sequence[ToolOutput]) -> None:
        """Loads the session's KV to the device while the tools without an output still run."""
        session = accepted.session
        if session.awaited_call_ids:
            names = {call.call_id: call.name for call in session.ledger}
            answered = [ToolWait(names[output.call_id]) for output in given if output.call_id in names]
            await self._kv.prefetch(await self._loader.history(principal.scope(), session), answered)


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
