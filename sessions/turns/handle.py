"""A turn as whoever started it, or came back to it, holds it.

Owns nothing: dropping it, or leaving its events early, changes nothing about the turn.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from graftwork.platform.errors import NotFound
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.events import SessionEvent
from graftwork.sessions.core.session import Turn
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.turns.event_reader import EventReader
from graftwork.sessions.turns.runner import TurnRunner


class RunningTurn:
    """One turn, running here, running elsewhere, or ended."""

    def __init__(
        self,
        scope: TenantScope,
        turn: Turn,
        store: TurnStore,
        reader: EventReader,
        running: tuple[TurnRunner, asyncio.Task[None]] | None = None,
    ) -> None:
        """`running` is given where the turn was started in this process, by this very request."""
        self._scope = scope
        self._turn = turn
        self._store = store
        self._reader = reader
        self._running = running

    @property
    def turn_id(self) -> TurnId:
        return self._turn.turn_id

    @property
    def session_id(self) -> SessionId:
        return self._turn.session_id

    @property
    def rate_limit_headers(self) -> Mapping[str, str]:
        """As of the turn's reservation; empty for a turn that this request did not start."""
        return {} if self._running is None else self._running[0].account.reservation.rate_limit_headers()

    @property
    def unenforced(self) -> tuple[str, ...]:
        """What of the turn's schemas is let go; empty for a turn that this request did not start."""
        grammar = None if self._running is None else self._running[0].plan.request.grammar
        return () if grammar is None else grammar.unenforced

    async def admitted(self) -> None:
        """Until the engine has taken the prompt, or the turn has ended. Raises what refused it before that."""
        if self._running is not None:
            await self._running[0].admitted()

    def cancel(self) -> None:
        """End the turn as cancelled, if this request started it and it has not ended by then."""
        if self._running is not None:
            self._running[0].cancel()

    async def stored(self) -> Turn:
        """The turn as it is stored now."""
        turn = await self._store.find_turn(self._scope, self.turn_id)
        if turn is None:
            raise NotFound("The turn does not exist any more.", code="turn_not_found")
        return turn

    async def events(self, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """The turn's events behind number `after`, to its terminal one."""
        start = max(after, self._turn.first_seq - 1)
        async with aclosing(self._reader.follow(self._scope, self.session_id, start)) as events:
            async for event in events:
                if event.turn_id != self.turn_id:
                    return
                yield event
                if event.is_terminal:
                    return

    async def result(self) -> Turn:
        """The turn once it has ended. Raises CapacityAbsent if its outcome could not be stored."""
        if self._running is None:
            async with aclosing(self.events()) as events:
                async for _ in events:
                    pass
        else:
            await asyncio.shield(self._running[1])
        return await self.stored()
