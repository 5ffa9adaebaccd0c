"""Speaks HTTP/1.1 for the load generators: sends a JSON body, and reads the answer line by line as it arrives.

Owns the connections of one client, which it uses again, and the rules of HTTP's framing. Never reads what a line says.
A general client spends several times as long on each streamed token as this one: with hundreds of streams it would take
a core from the server that is measured.

Invariant: an answer that breaks the rules, or that ends before its end, raises BrokenAnswer; its connection is not used
again. There is no proxy, no redirect, no compression and no retry.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

_CONNECT_WITHIN_S = 10.0
_IDLE_S = 2.0
"""How long an idle connection is kept. Servers close theirs after 5 s or more, so none closes one that is just used again."""
_MAX_HEADERS = 128
_MAX_LINE_BYTES = 2**16
"""Of the head of an answer, and of the line with the size of a chunk."""
_MAX_CHUNK_BYTES = 2**30
_READ_BYTES = 2**16
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n]*)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n\0]*)?")
_WITHOUT_BODY = (204, 304)


class BrokenAnswer(Exception):
    """Raised if there is no connection, or if an answer breaks HTTP's rules or ends too early. The message says which."""


@cache
def tls_context() -> ssl.SSLContext:
    """Returns the certificates that clients trust. Reading them takes long, so a phase begins after the first call."""
    return httpx.create_ssl_context()


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    async def line(self) -> bytes:
        """Reads a line of HTTP's own, without its end. Raises BrokenAnswer if it has none, or a wrong one."""
        try:
            line = await self.reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise BrokenAnswer("the connection ended where a line of HTTP was due") from error
        except asyncio.LimitOverrunError as error:
            raise BrokenAnswer(f"a line of HTTP is longer than {_MAX_LINE_BYTES} bytes") from error
        if not line.endswith(b"\r\n"):
            raise BrokenAnswer("a line of HTTP does not end with CR LF")
        return line[:-2]

    async def exactly(self, num_bytes: int) -> bytes:
        try:
            return await self.reader.readexactly(num_bytes)
        except asyncio.IncompleteReadError as error:
            raise BrokenAnswer("the connection ended in the middle of the answer") from error


class StreamedAnswer:
    """The head of an answer, and its body line by line."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self.status = status
        self.headers = headers
        """By names in lower case."""
        self.is_read = status in _WITHOUT_BODY
        """Whether the body was read to its end."""

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection can be used again, after the body."""
        has_end = self.status in _WITHOUT_BODY or bool({"transfer-encoding", "content-length"} & self.headers.keys())
        return has_end and self.headers.get("connection", "").lower() != "close"

    async def lines(self) -> AsyncIterator[bytes]:
        """Reads the lines of the body as they arrive, without their ends. Raises BrokenAnswer."""
        rest = b""
        async for part in self._parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line.removesuffix(b"\r")
        if rest:
            yield rest

    async def _parts(self) -> AsyncIterator[bytes]:
        if self.is_read:
            return
        coding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if coding is not None and length is not None:
            raise BrokenAnswer("the answer has both a content-length and a transfer-encoding")
        if coding is not None:
            if coding.lower() != "chunked":
                raise BrokenAnswer(f"the answer's transfer-encoding is {coding!r}, not chunked")
            async for part in self._chunks():
                yield part
        elif length is not None:
            if not re.fullmatch(r"\d{1,15}", length):
                raise BrokenAnswer(f"the answer's content-length is {length!r}, not one number")
            yield await self._connection.exactly(int(length))
        else:
            while part := await self._connection.reader.read(_READ_BYTES):
                yield part
        self.is_read = True

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            matched = _CHUNK_SIZE.fullmatch(line := await self._connection.line())
            if matched is None or (size := int(matched[1], 16)) > _MAX_CHUNK_BYTES:
                raise BrokenAnswer(f"{line[:40]!r} is no size of a chunk")
            if not size:
                break
            chunk = await self._connection.exactly(size + 2)
            if chunk[-2:] != b"\r\n":
                raise BrokenAnswer("a chunk is longer than its size says")
            yield chunk[:-2]
        await _read_headers(self._connection)  # trailers, which nobody reads


class StreamClient:
    """Sends requests to one server. Opens as many connections as requests run: a queue here would hide the server's."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`headers` go with each request. Raises ValueError for a URL without http or https and a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._is_tls else 80)
        self._path = parts.path.rstrip("/")
        given = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        if wrong := next((name for name, value in given.items() if re.search(r"[\r\n\0]", name + value)), None):
            raise ValueError(f"the header {wrong!r} has a line break")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncGenerator[StreamedAnswer, None]:
        """Sends a body, and yields the answer when its head has arrived. Raises BrokenAnswer, also inside the block."""
        connection = await self._connection()
        answer: StreamedAnswer | None = None
        try:
            head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
            connection.writer.write(head.encode("latin-1") + body)
            await connection.writer.drain()
            answer = await _read_head(connection)
            yield answer
        except OSError as error:
            raise BrokenAnswer(f"the connection broke: {error}") from error
        finally:
            if answer is not None and answer.is_read and answer.keeps_connection:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
            else:
                connection.writer.transport.abort()

    async def _connection(self) -> _Connection:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _IDLE_S and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=tls_context() if self._is_tls else None, limit=_MAX_LINE_BYTES
                )
        except (OSError, TimeoutError) as error:
            where = f"{self._host}:{self._port}"
            raise BrokenAnswer(f"no connection to {where} within {_CONNECT_WITHIN_S:.0f} s: {error}") from error
        return _Connection(reader, writer)


async def _read_head(connection: _Connection) -> StreamedAnswer:
    while True:
        matched = _STATUS_LINE.fullmatch(line := await connection.line())
        if matched is None:
            raise BrokenAnswer(f"{line[:40]!r} is no status line of HTTP/1.1")
        headers = await _read_headers(connection)
        if (status := int(matched[1])) >= 200:  # those below are only news of the answer to come
            break
    if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
        raise BrokenAnswer(f"the answer is encoded as {coding!r}, which was not asked for")
    return StreamedAnswer(connection, status, headers)


async def _read_headers(connection: _Connection) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        if not (line := await connection.line()):
            return headers
        if (matched := _HEADER.fullmatch(line)) is None:
            raise BrokenAnswer(f"{line[:40]!r} is no header")
        name, value = matched[1].decode("ascii").lower(), matched[2].decode("latin-1")
        if name in ("content-length", "transfer-encoding") and name in headers:
            raise BrokenAnswer(f"the answer has two headers {name}")
        headers[name] = value
    raise BrokenAnswer(f"the answer has more than {_MAX_HEADERS} headers")
