"""A stream's heartbeats, and how it is left."""

import asyncio
from collections.abc import AsyncGenerator

from graftwork.api.http.sse import with_heartbeats


async def test_leaving_ends_the_source_whatever_it_is_at() -> None:
    """Whoever leaves at a heartbeat, just as the next event has come, has ended the source when they are gone."""
    may_speak, spoke, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def source() -> AsyncGenerator[int]:
        try:
            await may_speak.wait()
            spoke.set()
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.set()

    source_events = source()
    beating = with_heartbeats(source_events, silence_s=0.0)
    assert await anext(beating) is None
    may_speak.set()
    await spoke.wait()
    await asyncio.sleep(0)

    await beating.aclose()

    assert ended.is_set()


async def test_events_come_in_order_between_the_beats() -> None:
    """Silence is a None, and no event is lost or moved by it."""
    steps = [asyncio.Event() for _ in range(3)]

    async def source() -> AsyncGenerator[int]:
        for number, step in enumerate(steps):
            await step.wait()
            yield number

    beating = with_heartbeats(source(), silence_s=0.0)
    seen: list[int] = []
    for step in steps:
        assert await anext(beating) is None
        step.set()
        while (event := await anext(beating)) is None:
            pass
        seen.append(event)

    assert seen == [0, 1, 2]
    assert [event async for event in beating if event is not None] == []
