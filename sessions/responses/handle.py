"""A response as whoever asked for it, or came back to it, holds it.

Owns nothing but the way back: `release` ends what only this holder wanted, and takes away what may not stay.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from graftwork.platform.errors import GraftworkError, NotFound, Unavailable
from graftwork.sessions.core.session import AgentSession, TurnStatus
from graftwork.sessions.responses.events import Event, ResponseEvents
from graftwork.sessions.responses.record import ResponseRecord
from graftwork.sessions.responses.views import IN_PROGRESS, QUEUED, response_body
from graftwork.sessions.turns.handle import TurnHandle


class ResponseHandle:
    """One response, running or ended."""

    def __init__(self, record: ResponseRecord, turn: TurnHandle, forget: Callable[[], Awaitable[None]]) -> None:
        """`forget` takes the response away, and whatever only it stood on."""
        self.record = record
        self._turn = turn
        self._forget = forget

    @property
    def rate_limit_headers(self) -> Mapping[str, str]:
        return self._turn.rate_limit_headers

    @property
    def unenforced(self) -> tuple[str, ...]:
        """What of the response's schemas is let go."""
        return self._turn.unenforced

    async def admitted(self) -> None:
        """Until the engine has taken the prompt. Raises what refused it before that, and then nothing is left."""
        try:
            await self._turn.admitted()
        except GraftworkError:
            await self.release()
            await self._forget()
            raise

    async def events(self, after: int = -1) -> AsyncGenerator[Event]:
        """The events behind number `after`, to the last. Raises Unavailable if the turn's end cannot be read."""
        reading = ResponseEvents(self.record)
        has_ended = False
        for event in reading.begin():
            if event["sequence_number"] > after:
                yield event
        async with aclosing(self._turn.events()) as turn_events:
            async for turn_event in turn_events:
                has_ended = turn_event.is_terminal
                news = reading.end(await self._turn.stored()) if has_ended else reading.read(turn_event)
                for event in news:
                    if event["sequence_number"] > after:
                        yield event
        if not has_ended:
            raise Unavailable("The response's end could not be read: retrieve it again.", retry_after_s=1.0)

    async def result(self) -> dict[str, Any]:
        """The response, once it has ended."""
        body: dict[str, Any] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                body = event.get("response", body)
        return body

    async def body(self, session: AgentSession) -> dict[str, Any]:
        """The response as it is now; `session` as it was read just before."""
        turn = await self._turn.stored()
        if turn.status is not TurnStatus.RUNNING:
            return await self.result()
        waits = self.record.is_background and session.last_seq < turn.first_seq
        return response_body(self.record, QUEUED if waits else IN_PROGRESS)

    def queued_body(self) -> dict[str, Any]:
        """The response as it was accepted."""
        return response_body(self.record, QUEUED)

    async def release(self) -> None:
        """Whoever asked for it is served, or has left: only a background response goes on, only a stored one stays."""
        if self.record.is_background:
            return
        self._turn.cancel()
        with suppress(NotFound):  # it was taken away before
            await self._turn.result()
        if not self.record.is_stored:
            await self._forget()
