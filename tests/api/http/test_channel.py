"""The channel between a producing task and its reader."""

import asyncio

import pytest

from graftwork.api.http.channel import Channel


async def test_order_and_end() -> None:
    """A reader gets every item in order, then the end, in any interleaving of the two tasks."""
    channel: Channel[int] = Channel(limit=2)

    async def produce() -> None:
        for item in range(10):
            await channel.put(item)
        channel.finish()

    producing = asyncio.create_task(produce())
    found: list[int] = []
    while items := await channel.get():
        found += items
    await producing

    assert found == list(range(10))


async def test_slow_reader() -> None:
    """A producer waits once `limit` items are unread."""
    channel: Channel[int] = Channel(limit=2)
    await channel.put(0)
    await channel.put(1)
    third = asyncio.create_task(channel.put(2))
    for _ in range(5):
        await asyncio.sleep(0)
    waited = not third.done()

    first = await channel.get()
    await third

    assert (waited, first, await channel.get()) == (True, [0, 1], [2])


async def test_error_comes_last() -> None:
    """Items put before a failure are read first, and only the first end counts."""
    channel: Channel[int] = Channel()
    await channel.put(1)
    channel.finish(ValueError("first"))
    channel.finish(ValueError("second"))

    assert await channel.get() == [1]
    with pytest.raises(ValueError, match="first"):
        await channel.get()


async def test_wait_for_first() -> None:
    """Waiting consumes no item, and a failure without items is raised at once."""
    fruitful: Channel[int] = Channel()
    waiting = asyncio.create_task(fruitful.wait_for_first())
    await fruitful.put(1)
    await waiting
    fruitless: Channel[int] = Channel()
    fruitless.finish(ValueError("nothing came"))

    assert await fruitful.get() == [1]
    with pytest.raises(ValueError, match="nothing came"):
        await fruitless.wait_for_first()
