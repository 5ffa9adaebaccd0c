"""A response's events as server-sent events, in OpenAI's frames.

What keeps a silent stream open is a comment, which no client takes for an event.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from graftwork.api.heartbeat import PING_AFTER_S, with_heartbeats
from graftwork.api.sse import error_event, named_event
from graftwork.platform.errors import GraftworkError

_COMMENT = b": still here\n\n"


async def response_stream(
    events: AsyncGenerator[dict[str, Any], None], silence_s: float = PING_AFTER_S
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes; it ends with the response's last event, without a `[DONE]`."""
    async with aclosing(with_heartbeats(events, silence_s)) as beating:
        try:
            async for event in beating:
                yield _COMMENT if event is None else named_event(event["type"], event)
        except GraftworkError as error:
            yield error_event(error)
