"""Reading a session's events: first what is stored, then what a running turn adds.

Owns the way from the store to the feed and back; never writes.
Any number of readers may follow; each goes at its own pace, and none is seen by the turn.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from graftwork.platform.ids import SessionId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.events import EventFeed, SessionEvent
from graftwork.sessions.store.turn_store import TurnStore

_PAGE_EVENTS = 256


class EventReader:
    """Follows the events of any session."""

    def __init__(
        self,
        store: TurnStore,
        feed_of: Callable[[SessionId], EventFeed | None],
        is_running: Callable[[TenantScope, SessionId], Awaitable[bool]],
        poll_s: float,
    ) -> None:
        """`feed_of` knows the turns that run in this process; the store is asked every `poll_s` for those elsewhere."""
        self._store = store
        self._feed_of = feed_of
        self._is_running = is_running
        self._poll_s = poll_s

    async def follow(self, scope: TenantScope, session_id: SessionId, after: int) -> AsyncGenerator[SessionEvent]:
        """The events behind number `after`, until no turn runs."""
        while True:
            feed = self._feed_of(session_id)
            # Both are asked for before looking: what happens in between is then either seen or waited for in vain.
            changed = None if feed is None else feed.next_change()
            page = None if feed is None else feed.after(after)
            if page is None:
                is_running = await self._is_running(scope, session_id)
                page = await self._store.list_events(scope, session_id, after, _PAGE_EVENTS)
                if not page and not is_running:
                    return
            for event in page:
                yield event
                after = event.seq
            if not page:
                await (asyncio.sleep(self._poll_s) if changed is None else changed.wait())
