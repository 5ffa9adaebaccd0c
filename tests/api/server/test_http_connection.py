"""Connections to a real server, over plain sockets."""

import asyncio
import json
import socket
from functools import partial

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from graftwork.api.http.streaming import WRITE_BODY, Write
from graftwork.api.server.http_connection import MAX_HEAD_BYTES, ConnectionLimits, HttpConnections
from graftwork.platform.settings.settings import Settings
from tests.api.gateway_on_port import gateway_on_port, running_server
from tests.api.in_process_gateway import Gateway
from tests.api.server.peer import Peer, let_others_run

_PIECE = 16 * 1024
_ANSWER_WITHIN_S = 20.0


async def test_head_of_allowed_size(gateway: Gateway) -> None:
    """A head just below the limit is served."""
    async with gateway_on_port(gateway) as url:
        status, _ = await _exchange(url, [_request(b"x-filler: " + b"a" * (MAX_HEAD_BYTES - 100))])

    assert status == 200


@pytest.mark.parametrize(
    "head",
    [
        pytest.param([b"GET /healthz HTTP/1.1\r\nx-filler: ", *[b"a" * _PIECE] * 64], id="one endless header"),
        pytest.param([b"GET /", *[b"a" * _PIECE] * 64], id="an endless URL"),
        pytest.param(
            [b"GET /healthz HTTP/1.1\r\n", *[b"x-filler: " + b"a" * 1000 + b"\r\n"] * 200], id="endless headers"
        ),
    ],
)
async def test_head_too_large(gateway: Gateway, head: list[bytes]) -> None:
    """A head without end is refused with a JSON error, and the connection closes."""
    async with gateway_on_port(gateway) as url:
        status, body = await _exchange(url, head)

    assert status == 431
    assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"


async def test_endless_trailers(gateway: Gateway) -> None:
    """Trailers of a chunked body count as part of the head."""
    key = (await gateway.tenant()).key.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer " + key + b"\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    async with gateway_on_port(gateway) as url:
        status, _ = await _exchange(url, [head, *[b"x-filler: " + b"a" * 1000 + b"\r\n"] * 200])

    assert status == 431


async def test_large_body(gateway: Gateway) -> None:
    """The limit is for heads only: a body of several limits arrives, whole and in chunks."""
    content = json.dumps({"model": "none", "prompt": "a" * (4 * MAX_HEAD_BYTES)}).encode()
    key = (await gateway.tenant()).key.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer " + key + b"\r\n"
    chunks = [content[start : start + 1000] for start in range(0, len(content), 1000)]
    chunked = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]

    async with gateway_on_port(gateway) as url:
        whole, _ = await _exchange(url, [head + b"content-length: %d\r\n\r\n" % len(content), content])
        in_chunks, _ = await _exchange(url, [head + b"transfer-encoding: chunked\r\n\r\n", *chunked, b"0\r\n\r\n"])

    assert (whole, in_chunks) == (404, 404)  # the body was read: it names a model that does not exist


async def test_malformed_request(gateway: Gateway) -> None:
    """A request that is no HTTP is refused with a JSON error."""
    async with gateway_on_port(gateway) as url:
        status, body = await _exchange(url, [b"what is this\r\n\r\n"])

    assert status == 400
    assert json.loads(body)["error"]["code"] == "bad_request"


async def test_no_delay(gateway: Gateway) -> None:
    """A token is sent at once: the server's side of a connection has TCP_NODELAY."""
    async with running_server(gateway) as (server, url), httpx.AsyncClient(base_url=url) as client:
        await client.get("/healthz")
        (connection,) = server.server_state.connections
        accepted: socket.socket = connection.transport.get_extra_info("socket")

        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_connections_from_one_address() -> None:
    """An address over its limit is refused until one of its connections closes; other addresses are not."""
    connections = HttpConnections(ConnectionLimits(per_address=2))

    first = [connections.enter("192.0.2.1") for _ in range(3)]
    other = connections.enter("192.0.2.2")
    connections.leave("192.0.2.1")
    connections.leave("192.0.2.1")

    assert (first, other) == ([True, True, False], True)
    assert connections.enter("192.0.2.1")


async def test_the_limit_of_a_server_as_it_is_installed() -> None:
    """An address may have 512 connections, as docs/operations.md says, unless the operator sets another number."""
    installed = HttpConnections(ConnectionLimits.of(Settings()))
    chosen = HttpConnections(ConnectionLimits.of(Settings(max_connections_per_address=2)))

    assert [installed.enter("192.0.2.1") for _ in range(513)] == [True] * 512 + [False]
    assert [chosen.enter("192.0.2.1") for _ in range(3)] == [True, True, False]


async def test_connections_from_this_machine() -> None:
    """A proxy on this machine holds the connections of all clients, so loopback has no limit."""
    connections = HttpConnections(ConnectionLimits(per_address=1))

    assert all(connections.enter(address) for address in ("127.0.0.1", "127.0.0.1", "::1", "::1"))


async def test_refused_connection() -> None:
    """A connection over the limit gets a 429 and closes."""
    connections = HttpConnections(ConnectionLimits(per_address=1))
    Peer(connections)
    peer = Peer(connections)

    assert (peer.status, peer.code) == (429, "too_many_connections")
    peer.time.advance(2)
    assert peer.is_closing()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([b"GET / HTTP/1.1\r\nx-half:"], 408, id="half a head"),
        pytest.param([b"GET /", *[b"a"] * 30], 408, id="a head by drops"),
        pytest.param([b"POST / HTTP/1.1\r\ncontent-length: 99\r\n\r\n{"], 408, id="half a body"),
        pytest.param([b"POST / HTTP/1.1\r\ncontent-length: 99\r\n\r\n", *[b"a"] * 60], 408, id="a body by drops"),
    ],
)
async def test_slow_request(sent: list[bytes], status: int | None) -> None:
    """A request that does not arrive in time is refused, and its connection closes; a silent one just closes."""
    peer = Peer(HttpConnections(ConnectionLimits()))

    for piece in sent:
        peer.send(piece)
        peer.time.advance(1)
    peer.time.advance(40)

    assert peer.status == status
    assert peer.is_closing()


async def test_slow_body_that_arrives() -> None:
    """A body may take many windows, if enough of it arrives in each."""
    peer = Peer(HttpConnections(ConnectionLimits(body_window_s=30, body_window_bytes=1000)))
    peer.send(b"POST / HTTP/1.1\r\ncontent-length: 50000\r\n\r\n")

    for _ in range(50):
        peer.send(b"a" * 1000)
        peer.time.advance(29)

    assert peer.status is None
    assert not peer.is_closing()


async def test_body_that_the_server_does_not_take() -> None:
    """The time in which the server itself does not read counts against no client."""
    peer = Peer(HttpConnections(ConnectionLimits()))
    peer.send(b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n" + b"a" * 100_000)

    peer.time.advance(500)

    assert peer.is_reading_paused
    assert peer.status is None


async def test_bytes_during_an_answer() -> None:
    """An answer takes as long as it needs, also if the client sends an empty line meanwhile."""
    peer = Peer(HttpConnections(ConnectionLimits()))
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    peer.send(b"\r\n")

    peer.time.advance(500)

    assert peer.status is None
    assert not peer.is_closing()


async def test_reader_that_stops() -> None:
    """A client that takes nothing of its answer for a whole window loses its connection."""
    peer = Peer(HttpConnections(ConnectionLimits(read_window_s=60)))
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    peer.waiting_bytes = 100_000
    peer.connection.pause_writing()

    for _ in range(5):
        peer.waiting_bytes -= 1
        peer.time.advance(60)
    was_aborted = peer.is_aborted
    peer.time.advance(60)

    assert (was_aborted, peer.is_aborted) == (False, True)


async def test_reader_that_goes_on() -> None:
    """A client that reads again in time keeps its connection."""
    peer = Peer(HttpConnections(ConnectionLimits(read_window_s=60)))
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    peer.connection.pause_writing()
    peer.time.advance(59)
    peer.connection.resume_writing()

    peer.time.advance(600)

    assert not peer.is_aborted


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1", b"HEAD / HTTP/1.1", b"GET / HTTP/1.0"], ids=bytes.decode)
async def test_pieces_of_a_stream(head: bytes) -> None:
    """A piece that is written to the connection directly has the bytes that uvicorn sends for it."""
    received = []
    for is_direct in (True, False):
        peer = Peer(HttpConnections(ConnectionLimits()), partial(_stream, is_direct))
        peer.send(head + b"\r\n\r\n")
        await asyncio.wait_for(peer.closed.wait(), _ANSWER_WITHIN_S)
        received.append(peer.received)

    assert received[0] == received[1]
    assert (b"one" in received[0]) == (not head.startswith(b"HEAD"))


async def test_a_piece_waits_for_a_slow_reader() -> None:
    """A piece of a stream waits until the client has taken what was written before. A client that left gets none."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        peer.connection.pause_writing()
        await scope["state"][WRITE_BODY](b"one")
        peer.abort()
        await scope["state"][WRITE_BODY](b"two")

    peer = Peer(HttpConnections(ConnectionLimits()), app)
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    await let_others_run()
    before = peer.received
    peer.connection.resume_writing()
    await let_others_run()

    assert b"one" not in before
    assert peer.received == before + b"3\r\none\r\n"


async def _stream(is_direct: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with a stream of pieces, one of them empty, and closes the connection."""

    async def send_piece(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    write: Write = scope["state"][WRITE_BODY] if is_direct else send_piece
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    for piece in (b"one", b"", "zwölf \x00\r\n".encode() * 3):
        await write(piece)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _request(header: bytes) -> bytes:
    return b"GET /healthz HTTP/1.1\r\nhost: test\r\nconnection: close\r\n" + header + b"\r\n\r\n"


async def _exchange(url: str, pieces: list[bytes]) -> tuple[int, bytes]:
    """Sends the pieces until the server closes, and returns the status and the body of its answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            reading = asyncio.create_task(reader.read())
            for piece in pieces:
                if reading.done():
                    break
                writer.write(piece)
                await writer.drain()
            answer = await reading
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
