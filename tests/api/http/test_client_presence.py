"""Tests of what ends when a client leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from graftwork.api.http.client_presence import WATCH_CLIENT, while_connected
from graftwork.api.http.streaming import EventStream, Write, until_disconnect


class _Client:
    """A client that leaves on demand; says so by ASGI's messages, or by a watch as our own connections have one."""

    def __init__(self, has_watch: bool) -> None:
        self._left = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        self.num_receives = 0
        self.scope: dict[str, Any] = {"type": "http", "state": {WATCH_CLIENT: self._watch} if has_watch else {}}

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def receive(self) -> Message:
        self.num_receives += 1
        if self.num_receives == 1:
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> None:
        self._left.set()
        for leave in [*self._watchers]:
            leave()
        await _let_others_run()

    def _watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(leave)
        return lambda: self._watchers.remove(leave)


@pytest.fixture(params=[False, True], ids=["by messages", "by a watch"])
def client(request: pytest.FixtureRequest) -> _Client:
    return _Client(request.param)


async def test_the_block_is_cancelled_when_the_client_leaves(client: _Client) -> None:
    """What the block waits for is cancelled, and the block raises ClientDisconnect."""
    ends: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def block() -> None:
        with while_connected(client.scope, client.receive):
            await wait()

    running = asyncio.create_task(block())
    await _let_others_run()
    await client.leave()

    with pytest.raises(ClientDisconnect):
        await running
    assert ends == ["cancelled"]
    assert running.cancelling() == 0


async def test_nothing_happens_after_the_block(client: _Client) -> None:
    """A client that leaves after the block's end cancels nothing, and nobody watches it any more."""

    async def block() -> str:
        with while_connected(client.scope, client.receive):
            await _let_others_run()
        await client.leave()
        await _let_others_run()
        return "done"

    assert await asyncio.create_task(block()) == "done"
    assert client.num_watchers == 0


async def test_another_cancel_stays_one(client: _Client) -> None:
    """A task that is cancelled from elsewhere raises CancelledError, also if its client leaves at the same time."""

    async def block() -> None:
        with while_connected(client.scope, client.receive):
            await asyncio.Event().wait()

    alone, both = asyncio.create_task(block()), asyncio.create_task(block())
    await _let_others_run()
    alone.cancel()
    await _let_others_run()
    both.cancel()
    await client.leave()

    for task in (alone, both):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_work_is_abandoned_once_the_client_has_left(client: _Client) -> None:
    """`until_disconnect` returns the result of its work, or abandons it if the client leaves or the work fails."""
    abandoned: list[str] = []

    async def answer() -> str:
        await _let_others_run()
        return "answer"

    async def fail() -> None:
        raise ZeroDivisionError

    request = Request(client.scope | {"method": "POST", "headers": []}, client.receive)
    found = await until_disconnect(request, answer(), lambda: abandoned.append("answered"))
    with pytest.raises(ZeroDivisionError):
        await until_disconnect(request, fail(), lambda: abandoned.append("failed"))
    waiting = asyncio.create_task(until_disconnect(request, asyncio.Event().wait(), lambda: abandoned.append("left")))
    await _let_others_run()
    await client.leave()

    with pytest.raises(ClientDisconnect):
        await waiting
    assert found == "answer"
    assert abandoned == ["failed", "left"]


async def test_a_stream_ends_with_its_client(client: _Client) -> None:
    """If the client leaves, the source is cancelled, `on_end` is called, and the response ends without an error."""
    sent, ends = list[bytes](), list[str]()

    async def source(write: Write) -> None:
        try:
            await write(b"data: 1\n\n")
            await asyncio.Event().wait()
        finally:
            ends.append("source")

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))

    stream = EventStream(source, on_end=lambda: ends.append("stream"))
    streaming = asyncio.create_task(stream(client.scope, client.receive, send))
    await _let_others_run()
    await client.leave()
    await streaming

    assert sent == [b"head", b"data: 1\n\n"]
    assert ends == ["source", "stream"]


async def _let_others_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
