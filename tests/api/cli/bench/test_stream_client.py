"""Tests of the load generators' HTTP client: with uvicorn, and with servers that break HTTP's rules."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from graftwork.api.cli.bench.load import ChatShape, Load, Target
from graftwork.api.cli.bench.stream_client import BrokenAnswer, StreamClient
from graftwork.platform.clock import SystemClock

_LINES = ["data: " + "ä" * size for size in (0, 1, 15, 16, 17, 255, 4096, 70_000)] + ["", "data: [DONE]", ""]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


async def _app(scope: Any, receive: Callable[[], Awaitable[dict[str, Any]]], send: _Send) -> None:
    """Repeats the request's body for `/echo`, and streams the lines above in pieces of odd sizes for other paths."""
    if scope["type"] != "http":
        return
    body = b""
    while (message := await receive()).get("more_body") or message.get("body"):
        body += message["body"]
        if not message.get("more_body"):
            break
    if scope["path"] == "/v1/echo":
        headers = {key.decode(): value.decode() for key, value in scope["headers"]} | {"body": body.decode()}
        text = json.dumps(headers).encode()
        await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})
        return
    text = "\r\n".join(_LINES).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for start in range(0, len(text), 997):
        await send({"type": "http.response.body", "body": text[start : start + 997], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def _uvicorn() -> AsyncGenerator[tuple[str, uvicorn.Server], None]:
    server = uvicorn.Server(uvicorn.Config(_app, log_level="critical", lifespan="off"))
    listening = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _raw(answer: bytes) -> AsyncGenerator[str, None]:
    """Serves these bytes on each connection, and then closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _lines(client: StreamClient, path: str = "/v1/stream") -> list[str]:
    async with client.post(path, b"{}") as answer:
        return [line.decode() async for line in answer.lines()]


async def test_a_stream_of_uvicorn_is_read_line_by_line() -> None:
    """Lines of all lengths arrive whole, whatever the pieces in which they were sent, as httpx reads them."""
    async with _uvicorn() as (url, _), StreamClient(url, {}) as client:
        ours = await _lines(client)
        theirs = await asyncio.to_thread(lambda: httpx.post(f"{url}/v1/stream", content=b"{}").text.split("\r\n"))

    assert ours == theirs[:-1]
    assert ours == _LINES[:-1]


async def test_headers_and_body_arrive() -> None:
    """The server gets the headers that were given, the host, and the body; the client the status and the headers."""
    async with (
        _uvicorn() as (url, _),
        StreamClient(f"{url}/v1/", {"Authorization": "Bearer a"}) as client,
        client.post("/echo", '{"a": "ä"}'.encode()) as answer,
    ):
        (line,) = [line async for line in answer.lines()]

    got = json.loads(line)
    assert answer.status == 418
    assert answer.headers["content-length"] == str(len(line))
    assert (got["authorization"], got["host"], got["body"]) == ("Bearer a", url.removeprefix("http://"), '{"a": "ä"}')


async def test_connections_are_used_again_and_as_many_as_requests() -> None:
    """Requests one after another take one connection, and requests at once one each."""
    async with _uvicorn() as (url, server), StreamClient(url, {}) as client:
        for _ in range(3):
            await _lines(client)
        one_after_another = len(server.server_state.connections)
        await asyncio.gather(*(_lines(client) for _ in range(5)))
        at_once = len(server.server_state.connections)

    assert (one_after_another, at_once) == (1, 5)


async def test_an_answer_that_is_given_up_ends_its_connection() -> None:
    """A client that stops in the middle of a stream sends its next request on another connection."""
    async with _uvicorn() as (url, _), StreamClient(url, {}) as client:
        async with client.post("/v1/stream", b"{}") as answer:
            assert [line async for line in _first(answer.lines())] == [b"data: "]

        assert await _lines(client) == _LINES[:-1]


async def _first(lines: Any) -> AsyncGenerator[bytes, None]:
    async for line in lines:
        yield line
        return


async def test_a_stream_that_ends_in_time_may_lack_its_length() -> None:
    """Without a length and chunks the end of the connection is the end of the answer, and a line needs no end."""
    async with _raw(b"HTTP/1.1 200 OK\r\n\r\ndata: a\n\ndata: b") as url, StreamClient(url, {}) as client:
        assert await _lines(client) == ["data: a", "", "data: b"]


async def test_news_before_the_answer_are_passed_over() -> None:
    """A status of 100 to 199 is no answer yet."""
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.0 200\r\n"
    async with _raw(head + b"Content-Length: 2\r\n\r\nok") as url, StreamClient(url, {}) as client:
        assert await _lines(client) == ["ok"]


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "where a line of HTTP was due"),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n", "where a line of HTTP was due"),
        (b"HTTP/2 200 OK\r\n\r\n", "no status line"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "no status line"),
        (b"HTTP/1.1 200 OK\n\n", "CR LF"),
        (b"HTTP/1.1 200 OK\r\nA b\r\n\r\n", "no header"),
        (b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n", "no header"),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", "no header"),
        (b"HTTP/1.1 200 OK\r\n" + 200 * b"A: b\r\n" + b"\r\n", "more than 128 headers"),
        (b"HTTP/1.1 200 OK\r\nA: " + 70_000 * b"b" + b"\r\n\r\n", "longer than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", "gzip"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok", "not one number"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok", "not one number"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", "two headers content-length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "not chunked"),
        (_CHUNKED[:-2] + b"Content-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n", "both a content-length and"),
        (_CHUNKED + b"2\r\nok\r\n", "where a line of HTTP was due"),
        (_CHUNKED + b"2\r\nok\r\n0\r\n", "where a line of HTTP was due"),
        (_CHUNKED + b"5\r\nok\r\n", "in the middle"),
        (_CHUNKED + b"1\r\nok\r\n0\r\n\r\n", "longer than its size"),
        (_CHUNKED + b"\r\nok\r\n0\r\n\r\n", "no size of a chunk"),
        (_CHUNKED + b"-2\r\nok\r\n0\r\n\r\n", "no size of a chunk"),
        (_CHUNKED + b"0x2\r\nok\r\n0\r\n\r\n", "no size of a chunk"),
        (_CHUNKED + b"2 ok\r\n0\r\n\r\n", "no size of a chunk"),
        (_CHUNKED + b"ffffffff\r\n", "no size of a chunk"),
        (_CHUNKED + b"2\nok\n0\n\n", "CR LF"),
    ],
)
async def test_an_answer_that_breaks_the_rules_is_no_answer(answer: bytes, reason: str) -> None:
    """Wrong framing, and an end before the end, raise BrokenAnswer with what is wrong."""
    async with _raw(answer) as url, StreamClient(url, {}) as client:
        with pytest.raises(BrokenAnswer, match=reason):
            await _lines(client)


async def test_a_server_that_is_not_there_is_a_broken_answer() -> None:
    """A port where nobody listens raises BrokenAnswer with the address."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async with StreamClient(f"http://127.0.0.1:{port}", {}) as client:
        with pytest.raises(BrokenAnswer, match=f"no connection to 127.0.0.1:{port}"):
            await _lines(client)


@pytest.mark.parametrize("url", ["ftp://a", "127.0.0.1:80", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    """A URL without http or https, or without a host, raises ValueError."""
    with pytest.raises(ValueError, match="no http:// or https:// URL"):
        StreamClient(url, {})


def test_a_header_with_a_line_break_is_refused() -> None:
    """A key that would begin another header raises ValueError."""
    with pytest.raises(ValueError, match="line break"):
        StreamClient("http://a", {"Authorization": "Bearer a\r\nX: y"})


def _events(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    return _CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


_PIECE = '{"choices": [{"delta": {"content": "a"}}]}'
_USAGE = '{"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}'


@pytest.mark.parametrize(
    ("answer", "status", "tokens"),
    [
        (_events(_PIECE, _PIECE, _USAGE, "[DONE]"), 200, 3),
        (_events(_PIECE, _PIECE, _USAGE), None, 3),
        (_events(_PIECE, '{"error": {"message": "m"}}', "[DONE]"), 500, 1),
        (_events(_PIECE)[:-5], None, 1),
        (b"HTTP/1.1 429 No\r\nRetry-After: 0\r\nContent-Length: 8\r\n\r\ndata: {}", 429, 0),
    ],
)
async def test_a_chat_counts_as_answered_only_with_its_end(answer: bytes, status: int | None, tokens: int) -> None:
    """A stream without `[DONE]`, or without the end of HTTP's framing, is a broken one; one with an error has failed."""
    async with _raw(answer) as url:
        load = Load(SystemClock())
        await load.open("tenant", Target(url, "key", "model"), ChatShape(), [0.0])

    (one,) = load.sent
    assert (one.status, one.num_tokens) == (status, tokens)
