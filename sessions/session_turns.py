"""Turns as handles: started here, or found again by their ids."""

from collections.abc import Sequence

from graftwork.platform.ids import TurnId
from graftwork.platform.principals import Principal, TenantScope
from graftwork.sessions.agent_session import AgentSession, SessionSettings
from graftwork.sessions.event_reader import EventReader
from graftwork.sessions.items import Item
from graftwork.sessions.running_turn import RunningTurn
from graftwork.sessions.turn_launcher import TurnLauncher
from graftwork.sessions.turn_runner import NO_HINTS, ToolHints
from graftwork.sessions.turn_store import TurnStore


class SessionTurns:
    """Turns of all tenants."""

    def __init__(self, store: TurnStore, launcher: TurnLauncher, reader: EventReader) -> None:
        self._store = store
        self._launcher = launcher
        self._reader = reader

    async def launch(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        tool_hints: ToolHints = NO_HINTS,
    ) -> RunningTurn:
        """Start a turn of these items on a session that still is as it is given.

        It runs with that session's model and with these settings; if they open otherwise than the history's tokens do,
        the history is encoded anew. Raises Conflict, ContextLengthExceeded, LimitExceeded.
        """
        runner, task = await self._launcher.launch(principal, session, new_items, settings, tool_hints)
        return RunningTurn(principal.scope(), runner.turn, self._store, self._reader, (runner, task))

    async def find(self, scope: TenantScope, turn_id: TurnId) -> RunningTurn | None:
        """A turn that was started before, here or elsewhere."""
        turn = await self._store.find_turn(scope, turn_id)
        return None if turn is None else RunningTurn(scope, turn, self._store, self._reader)
