"""A server that answers both SDK clients from a script, without a network."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from graftwork.api.sdk.client import AsyncGraftwork, Graftwork

Reply = httpx.Response | httpx.TransportError
Rule = Callable[[httpx.Request], Reply]


class PiecesOfBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in pieces and may then break off."""

    def __init__(self, pieces: Sequence[bytes], broken: bool = False) -> None:
        self._pieces = pieces
        self._broken = broken
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        if self._broken:
            raise httpx.RemoteProtocolError("peer closed the connection")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class ScriptedServer:
    """Answers each request with the next reply or by a rule. Records the requests and the waits between them."""

    def __init__(self, *replies: Reply, rule: Rule | None = None) -> None:
        self._replies = list(replies)
        self._rule = rule
        self.requests: list[httpx.Request] = []
        self.waits: list[float] = []

    def client(self, max_retries: int = 2) -> Graftwork:
        transport = httpx.MockTransport(self._answer)
        return Graftwork(
            "http://graftwork.test",
            "gw_key",
            "gwa_key",
            max_retries=max_retries,
            transport=transport,
            sleep=self._sleep,
        )

    def async_client(self, max_retries: int = 2) -> AsyncGraftwork:
        transport = httpx.MockTransport(self._answer)
        return AsyncGraftwork(
            "http://graftwork.test",
            "gw_key",
            "gwa_key",
            max_retries=max_retries,
            transport=transport,
            sleep=self._sleep_async,
        )

    def body(self, index: int) -> Any:
        return json.loads(self.requests[index].content)

    @property
    def lines(self) -> list[str]:
        """`METHOD path` of each request."""
        return [f"{request.method} {request.url.raw_path.decode()}" for request in self.requests]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self._rule(request) if self._rule else self._replies.pop(0)
        if isinstance(reply, httpx.TransportError):
            raise reply
        return reply

    def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def _sleep_async(self, seconds: float) -> None:
        self.waits.append(seconds)


def error(status: int, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"message": "No.", "type": "t", "param": None, "code": "c"} | fields
    return httpx.Response(status, headers={"x-request-id": "req_1", **(headers or {})}, json={"error": body})


def stream(*pieces: bytes, broken: bool = False) -> httpx.Response:
    return httpx.Response(
        200, headers={"content-type": "text/event-stream"}, stream=PiecesOfBody(pieces, broken=broken)
    )


def frame(seq: int, kind: str, **fields: Any) -> bytes:
    """One session event as the server sends it."""
    data = {"type": kind, "seq": seq, "session_id": "ses_1", "turn_id": "trn_1", **fields}
    return f"id: {seq}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def session(**fields: Any) -> httpx.Response:
    body = {"id": "ses_1", "object": "session", "status": "idle", "head": None, "created_at": 1.0, "last_seq": 0}
    return httpx.Response(201, json=body | {"model": {"name": "base", "version": None, "digest": None}} | fields)


def turn(status: str = "completed", text: str = "", **fields: Any) -> httpx.Response:
    content = [{"type": "output_text", "text": text}]
    output = [{"type": "message", "role": "assistant", "content": content}] if text else []
    body = {"id": "trn_1", "object": "turn", "status": status, "output": output, "tool_calls": []}
    return httpx.Response(200, json=body | {"checkpoint_id": "ckp_1", "usage": None, "cache": None} | fields)
