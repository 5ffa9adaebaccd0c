"""Connections to a real server, over plain sockets."""

import asyncio
import json

import pytest

from graftwork.api.server.http_connection import MAX_HEAD_BYTES
from tests.api.harness import Gateway
from tests.api.served import served

_PIECE = 16 * 1024
_ANSWER_WITHIN_S = 20.0


async def test_head_of_allowed_size(gateway: Gateway) -> None:
    """A head just below the limit is served."""
    async with served(gateway) as url:
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
    async with served(gateway) as url:
        status, body = await _exchange(url, head)

    assert status == 431
    assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"


async def test_endless_trailers(gateway: Gateway) -> None:
    """Trailers of a chunked body count as part of the head."""
    key = (await gateway.tenant()).key.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer " + key + b"\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    async with served(gateway) as url:
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

    async with served(gateway) as url:
        whole, _ = await _exchange(url, [head + b"content-length: %d\r\n\r\n" % len(content), content])
        in_chunks, _ = await _exchange(url, [head + b"transfer-encoding: chunked\r\n\r\n", *chunked, b"0\r\n\r\n"])

    assert (whole, in_chunks) == (404, 404)  # the body was read: it names a model that does not exist


async def test_malformed_request(gateway: Gateway) -> None:
    """A request that is no HTTP is refused with a JSON error."""
    async with served(gateway) as url:
        status, body = await _exchange(url, [b"what is this\r\n\r\n"])

    assert status == 400
    assert json.loads(body)["error"]["code"] == "bad_request"


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
