"""Reads turns and the events of sessions, for the request that started a turn and for later requests.

Owns how events are read: first the stored events, then the events that a running turn adds.
Never writes anything. A turn goes on if its reader disconnects.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from graftwork.platform.errors import NotFound
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.events import EventFeed, SessionEvent
from graftwork.sessions.core.session import SessionStatus, Turn
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.turns.running import RunningTurns, SessionLoader, TurnTask

_PAGE_EVENTS = 256


class TurnReader:
    """Reads turns and events of all sessions. Any number of requests may follow one session."""

    def __init__(self, store: TurnStore, loader: SessionLoader, running: RunningTurns, poll_s: float) -> None:
        """`poll_s` is the time in seconds between two checks of a turn that runs in another process."""
        self.store = store
        self._loader = loader
        self._running = running
        self._poll_s = poll_s

    async def find(self, scope: TenantScope, turn_id: TurnId) -> "TurnHandle | None":
        """Finds a turn that was started earlier, in this process or another.

        Returns None if the turn does not exist.
        """
        turn = await self.store.find_turn(scope, turn_id)
        return None if turn is None else TurnHandle(scope, turn, self)

    async def follow(self, scope: TenantScope, session_id: SessionId, after: int) -> AsyncGenerator[SessionEvent]:
        """Yields the session's events with numbers above `after`, until no turn runs.

        Reads a feed to its end, also after it is closed, so that the last events need no read of the store.
        """
        feed: EventFeed | None = None
        while True:
            if feed is None or (feed.is_closed and feed.last_seq <= after):
                feed = self._running.feed_of(session_id)
            # Get the change before reading the page, so that an event between the two steps is not missed.
            changed = None if feed is None else feed.next_change()
            page = None if feed is None else feed.after(after)
            if page is None:
                session = await self._loader.load_any(scope, session_id)
                page = await self.store.list_events(scope, session_id, after, _PAGE_EVENTS)
                if not page and session.status is not SessionStatus.RUNNING:
                    return
            for event in page:
                yield event
                after = event.seq
            if not page:
                await (asyncio.sleep(self._poll_s) if changed is None else changed.wait())


class TurnHandle:
    """One turn. It runs in this process or another, or it has ended."""

    def __init__(self, scope: TenantScope, turn: Turn, reader: TurnReader, started: TurnTask | None = None) -> None:
        """`started` is the turn's task if this request has started the turn."""
        self._scope = scope
        self._turn = turn
        self._reader = reader
        self._started = started

    @property
    def turn_id(self) -> TurnId:
        return self._turn.turn_id

    @property
    def session_id(self) -> SessionId:
        return self._turn.session_id

    @property
    def rate_limit_headers(self) -> Mapping[str, str]:
        """The rate limit headers of the turn's quota reservation; empty if another request has started the turn."""
        return {} if self._started is None else self._started[0].account.reservation.rate_limit_headers()

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The places of schema keywords that the grammar ignores; empty if another request has started the turn."""
        grammar = None if self._started is None else self._started[0].plan.request.grammar
        return () if grammar is None else grammar.unenforced

    async def admitted(self) -> None:
        """Waits until the engine has admitted the prompt or the turn has ended.

        Raises the engine's error if the engine refuses the prompt.
        """
        if self._started is not None:
            await self._started[0].admitted()

    def cancel(self) -> None:
        """Cancels the turn if this request has started it. Otherwise does nothing."""
        if self._started is not None:
            self._started[0].cancel()

    async def stored(self) -> Turn:
        """Reads the turn as it is stored now. Raises NotFound if the turn was deleted."""
        turn = await self._reader.store.find_turn(self._scope, self.turn_id)
        if turn is None:
            raise NotFound("The turn does not exist any more.", code="turn_not_found")
        return turn

    async def events(self, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """Yields the turn's events with numbers above `after`, up to the turn's last event."""
        start = max(after, self._turn.first_seq - 1)
        async with aclosing(self._reader.follow(self._scope, self.session_id, start)) as events:
            async for event in events:
                if event.turn_id != self.turn_id:
                    return
                yield event
                if event.is_terminal:
                    return

    async def result(self) -> Turn:
        """Waits for the turn's end, and returns the stored turn.

        Raises Unavailable if its outcome could not be stored.
        """
        if self._started is None:
            async with aclosing(self.events()) as events:
                async for _ in events:
                    pass
        else:
            await asyncio.shield(self._started[1])
        return await self.stored()
