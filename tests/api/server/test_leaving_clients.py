"""Tests of handlers whose clients leave, at a connection of our own."""

import asyncio
from functools import partial

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from graftwork.api.http.client_presence import while_connected
from graftwork.api.server.http_connection import ConnectionLimits, HttpConnections
from tests.api.server.peer import Peer, let_others_run


@pytest.mark.parametrize("how", ["leaves", "is refused", "leaves with a second request"])
async def test_a_handler_ends_with_its_client(how: str) -> None:
    """A handler that waits for something ends when its connection is lost or refused, also if another request waits."""
    ends: list[str] = []
    peer = Peer(HttpConnections(ConnectionLimits()), partial(_wait_for_ever, ends))
    peer.send(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
    await let_others_run()
    if how == "leaves with a second request":
        peer.send(b"GET /second HTTP/1.1\r\n\r\n")
    waited = not ends

    if how == "is refused":
        peer.send(b"what is this\r\n\r\n")
    else:
        peer.abort()
    await let_others_run()

    assert waited
    assert ends[:1] == ["/ left"]


async def test_a_client_that_has_left_before_is_noticed() -> None:
    """A handler that begins to wait for something after its client has left does not wait."""
    ends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        peer.abort()
        await _wait_for_ever(ends, scope, receive, send)

    peer = Peer(HttpConnections(ConnectionLimits()), app)
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    await let_others_run()

    assert ends == ["/ left"]


async def test_a_client_is_watched_also_where_reading_was_paused() -> None:
    """The connection reads on while a handler waits, or nobody would notice that the client leaves."""
    ends: list[str] = []
    peer = Peer(HttpConnections(ConnectionLimits()), partial(_wait_for_ever, ends))
    peer.send(b"POST / HTTP/1.1\r\ncontent-length: 100000\r\n\r\n" + b"a" * 100_000)
    was_paused = peer.is_reading_paused

    await let_others_run()

    assert (was_paused, peer.is_reading_paused) == (True, False)


async def _wait_for_ever(ends: list[str], scope: Scope, receive: Receive, send: Send) -> None:
    """Notes how a wait ends that only the client can end."""
    try:
        with while_connected(scope, receive):
            await asyncio.Event().wait()
    except ClientDisconnect:
        ends.append(f"{scope['path']} left")
