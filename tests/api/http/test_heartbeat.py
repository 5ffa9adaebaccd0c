"""A stream's heartbeats: silence is filled, and nothing else changes."""

import asyncio

from graftwork.api.http.streaming import heartbeats

PING = b"ping"


class Client:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._arrived = asyncio.Event()

    async def write(self, event: bytes) -> None:
        self.received.append(event)
        self._arrived.set()

    async def receive(self) -> bytes:
        """The next event to come."""
        self._arrived.clear()
        await self._arrived.wait()
        return self.received[-1]


async def test_silence_is_filled_with_pings() -> None:
    """While no event is written, pings are, and the events keep their order between them."""
    client = Client()

    async with heartbeats(client.write, PING, silence_s=0.0) as write:
        for event in (b"1", b"2", b"3"):
            assert await client.receive() == PING
            await write(event)

    assert [event for event in client.received if event != PING] == [b"1", b"2", b"3"]


async def test_an_event_puts_the_next_ping_off() -> None:
    """A stream that is never silent for so long gets no ping."""
    client = Client()

    async with heartbeats(client.write, PING, silence_s=3600.0) as write:
        await write(b"1")
        await asyncio.sleep(0)
        await write(b"2")

    assert client.received == [b"1", b"2"]


async def test_no_ping_after_the_end() -> None:
    """Leaving the block ends the beating."""
    client = Client()

    async with heartbeats(client.write, PING, silence_s=0.0):
        await client.receive()
    seen = len(client.received)
    for _ in range(10):
        await asyncio.sleep(0)

    assert len(client.received) == seen
