"""Gives an HTTP request access to the one response that it creates or reads.

Owns what happens at the end of the HTTP request: `release` cancels a response that does not run in the background, and
deletes a response that must not be stored. Never writes the turn that makes the response.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from graftwork.platform.errors import GraftworkError, NotFound, Unavailable
from graftwork.sessions.core.session import AgentSession, TurnStatus
from graftwork.sessions.responses.events import Event, ResponseEvents
from graftwork.sessions.responses.record import ResponseRecord
from graftwork.sessions.responses.views import IN_PROGRESS, QUEUED, response_body
from graftwork.sessions.turns.running import TurnHandle


class ResponseHandle:
    """One response of the Responses API, running or ended. A client's request reads or cancels the response here."""

    def __init__(self, record: ResponseRecord, turn: TurnHandle, delete: Callable[[], Awaitable[None]]) -> None:
        """`delete` deletes the response, and the session if nothing else uses it."""
        self.record = record
        self._turn = turn
        self._delete = delete

    @property
    def rate_limit_headers(self) -> Mapping[str, str]:
        return self._turn.rate_limit_headers

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The paths of the schema keywords that this response's grammar ignores, because it cannot enforce them.

        There are none if another HTTP request has started the response.
        """
        return self._turn.unenforced

    @property
    def output_cap(self) -> int | None:
        """The operator's limit that has lowered the most tokens of the answer; None if there is none."""
        return self._turn.output_cap

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of the history that the prompt leaves out, as the header for ignored parts names them."""
        num_dropped = self._turn.num_dropped
        return (f"truncation (dropped {num_dropped} items)",) if num_dropped else ()

    async def admitted(self) -> None:
        """Waits until the engine has admitted the prompt of the response, or the response has ended.

        If the engine refuses the prompt, deletes the response and raises the engine's error.
        """
        try:
            await self._turn.admitted()
        except GraftworkError:
            await self.release()
            await self._delete()
            raise

    async def events(self, after: int = -1) -> AsyncGenerator[Event]:
        """Yields the events of the response whose sequence number is above `after`, until the response ends.

        Raises Unavailable if the last event of the response cannot be read.
        """
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
        """Waits until the response has ended, and returns the JSON body of the response."""
        body: dict[str, Any] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                body = event.get("response", body)
        return body

    async def body(self, session: AgentSession) -> dict[str, Any]:
        """Returns the JSON body of the response as it is now. Does not wait for the end of the response.

        `session` is the session of the response. The caller must have read it from the store just before.
        """
        turn = await self._turn.stored()
        if turn.status is not TurnStatus.RUNNING:
            return await self.result()
        waits = self.record.is_background and session.last_seq < turn.first_seq
        return response_body(self.record, QUEUED if waits else IN_PROGRESS)

    def queued_body(self) -> dict[str, Any]:
        """Returns the JSON body of the response with the status `queued`, for a response that has not started yet."""
        return response_body(self.record, QUEUED)

    def cancel(self) -> None:
        """Cancels the response if this handle has started it. Does not wait for its end, and deletes nothing."""
        self._turn.cancel()

    async def discard(self) -> None:
        """Waits until the response has ended, and deletes it."""
        with suppress(NotFound):
            await self._turn.result()
        await self._delete()

    async def release(self) -> None:
        """Ends the work for the client's request. Does nothing if the response runs in the background.

        Otherwise cancels the response if this request has started it, and waits until the response has ended. Then
        deletes the response if it must not be stored.
        """
        if self.record.is_background:
            return
        self._turn.cancel()
        with suppress(NotFound):  # another request has deleted it
            await self._turn.result()
        if not self.record.is_stored:
            await self._delete()
