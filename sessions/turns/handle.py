"""Reads turns and the events of sessions, for the request that started a turn and for later requests.

Owns how events are read: first the stored events, then the events that a running turn adds.
Never writes anything. A turn continues to run if the client that reads it disconnects.
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
    """Reads the turns and events of all sessions. Several requests may read the same session's events at once."""

    def __init__(self, store: TurnStore, loader: SessionLoader, running: RunningTurns, poll_s: float) -> None:
        """`poll_s` is the time in seconds between two checks of a turn that runs in another process."""
        self.store = store
        self._loader = loader
        self._running = running
        self._poll_s = poll_s

    async def find(self, scope: TenantScope, turn_id: TurnId) -> "TurnHandle | None":
        """Returns access to a turn that was started earlier, in this process or another. The turn may have ended.

        Returns None if the turn does not exist.
        """
        turn = await self.store.find_turn(scope, turn_id)
        return None if turn is None else TurnHandle(scope, turn, self)

    async def follow(self, scope: TenantScope, session_id: SessionId, after: int) -> AsyncGenerator[SessionEvent]:
        """Yields the events of a session whose number is above `after`, and waits for new ones. Ends when no turn runs.

        Takes events from memory (the feed of a turn that runs in this process) if it has them, and otherwise from the
        store.
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
    """Access to one turn: its events and its result, and a way to cancel it.

    The turn may run in this process or another, or it may have ended.
    """

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
        """The HTTP headers that show what is left of the tenant's quota after the reservation for this turn.

        They are empty if another request has started the turn.
        """
        return {} if self._started is None else self._started[0].account.reservation.rate_limit_headers()

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The paths of the schema keywords that the grammar of this turn ignores, because it cannot enforce them.

        There are none if another request has started the turn.
        """
        grammar = None if self._started is None else self._started[0].plan.request.grammar
        return () if grammar is None else grammar.unenforced

    @property
    def num_dropped(self) -> int:
        """How many of the oldest items of the history the prompt leaves out.

        It is 0 if another request has started the turn.
        """
        return 0 if self._started is None else self._started[0].plan.num_dropped

    async def admitted(self) -> None:
        """Waits until the engine has admitted the prompt of the turn, or the turn has ended.

        Raises the engine's error if the engine refuses the prompt. Returns at once if another request has started the
        turn.
        """
        if self._started is not None:
            await self._started[0].admitted()

    def cancel(self) -> None:
        """Cancels the turn if this request has started it. Otherwise does nothing.

        Does not wait for the end of the turn.
        """
        if self._started is not None:
            self._started[0].cancel()

    async def stored(self) -> Turn:
        """Reads the turn from the store, as it is now. Raises NotFound if the turn was deleted."""
        turn = await self._reader.store.find_turn(self._scope, self.turn_id)
        if turn is None:
            raise NotFound("The turn does not exist any more.", code="turn_not_found")
        return turn

    async def events(self, after: int = 0) -> AsyncGenerator[SessionEvent]:
        """Yields the events of this turn whose number is above `after`, up to the turn's last event.

        Waits for events that the turn has not made yet.
        """
        start = max(after, self._turn.first_seq - 1)
        async with aclosing(self._reader.follow(self._scope, self.session_id, start)) as events:
            async for event in events:
                if event.turn_id != self.turn_id:
                    return
                yield event
                if event.is_terminal:
                    return

    async def result(self) -> Turn:
        """Waits until the turn has ended, and reads the turn from the store.

        Raises Unavailable if the end of the turn could not be stored. Raises NotFound if the turn was deleted.
        """
        if self._started is None:
            async with aclosing(self.events()) as events:
                async for _ in events:
                    pass
        else:
            await asyncio.shield(self._started[1])
        return await self.stored()
