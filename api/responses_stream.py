"""A response's events as server-sent events, in OpenAI's frames.

What keeps a silent stream open is a comment, which no client takes for an event.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from graftwork.api.heartbeat import HEARTBEAT_AFTER_S, with_heartbeat
from graftwork.api.sse import named_event

_COMMENT = b": still here\n\n"


def response_stream(
    events: AsyncGenerator[dict[str, Any], None], after_s: float = HEARTBEAT_AFTER_S
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes; it ends with the response's last event, without a `[DONE]`."""
    return with_heartbeat(_frames(events), _COMMENT, after_s)


async def _frames(events: AsyncGenerator[Mapping[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield named_event(event["type"], event)
