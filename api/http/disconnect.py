"""Stops a handler's work when its client disconnects."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

Result = TypeVar("Result")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result], abandon: Callable[[], None]) -> Result:
    """Return the result of `work`. If `work` fails or the client leaves first, call `abandon`.

    Raises the error of `work`, or ClientDisconnect. The caller must have read the request's body to its end.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    except BaseException:
        abandon()
        raise
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
