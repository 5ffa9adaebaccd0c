"""Ends a stream that only reads, when the key of its request loses its access.

Owns the moment between the two. A stream that runs work of its own, such as an answer that is generated, needs none of
this: the end of the work ends it. Never ends the turn that is read: another key may have started it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from graftwork.api.http.streaming import EventStream, Write, error_event
from graftwork.platform.errors import NotPermitted
from graftwork.platform.tenancy.principals import Principal, RunningWork


def read_stream(work: RunningWork, principal: Principal, source: Callable[[Write], Awaitable[None]]) -> EventStream:
    """Returns a response that streams what `source` writes, for as long as `principal` has its access.

    If the key is revoked, or its tenant suspended or deleted, the last event is an `error` with the code `access_ended`.
    """

    async def guarded(write: Write) -> None:
        access_ended: asyncio.Future[NotPermitted] = asyncio.get_running_loop().create_future()

        def end(error: NotPermitted) -> None:
            if not access_ended.done():
                access_ended.set_result(error)

        forget = work.add(principal, end)
        writing = asyncio.ensure_future(source(write))
        ends: list[asyncio.Future[Any]] = [writing, access_ended]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forget()
            if not writing.done():
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        if access_ended.done() and writing.cancelled():
            await write(error_event(access_ended.result()))
        else:
            writing.result()

    return EventStream(guarded)
