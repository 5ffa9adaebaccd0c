"""Answers a GET that repeats the bytes of the one before on its connection, without reading it again.

    first poll ──► parser ──► application, which offers a `Repeat` in the request's state
    same bytes ──► Repeat ──► answer              only `if-none-match` may differ

A watcher polls the same address every second, and reading its request costs ten times as much as its answer.
Owns which requests are the same, and the bytes of their answers. Never knows who asks: the `Repeat` checks the key
again, and returns None if the application must read the request.
"""

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any

from graftwork.api.http.response_headers import REQUEST_ID, TRACE_ID
from graftwork.platform.ids import new_id
from graftwork.platform.tracing.trace_ids import new_trace_id

_REPEAT = "repeat"
"""The key in a request's state for its `Repeat`."""
_END = b"\r\n\r\n"
_CONDITION = re.compile(rb"\r\nif-none-match:[ \t]*([^\r\n]*)", re.IGNORECASE)
_SINGLE_USE = frozenset(
    {
        b"connection",  # only `keep-alive` may be repeated
        b"content-length",
        b"expect",
        b"origin",
        b"traceparent",
        b"transfer-encoding",
        b"upgrade",
        b"x-graftwork-trace",
        b"x-request-id",
    }
)
"""The headers of requests that are never repeated: they announce a body, or ask for headers of their own."""


@dataclass(frozen=True)
class Reply:
    """An answer that many requests get, without the headers that each of them gets for itself."""

    status: int
    headers: Mapping[str, str]
    """With lower-case names, and without `content-length`."""
    body: bytes = b""
    """Empty for a 304."""

    @cached_property
    def head(self) -> bytes:
        """The status line and the headers as HTTP/1.1 sends them, without the empty line at their end."""
        length = {} if self.status == HTTPStatus.NOT_MODIFIED else {"content-length": str(len(self.body))}
        lines = (f"{name}: {value}\r\n" for name, value in {**self.headers, **length}.items())
        return f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{''.join(lines)}".encode("latin-1")

    def encode(self, more_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Returns the whole answer, with `more_headers` and new ids."""
        more = [b"%b: %b\r\n" % header for header in more_headers]
        ids = f"{REQUEST_ID}: {new_id('req')}\r\n{TRACE_ID}: {new_trace_id()}\r\n\r\n".encode()
        return b"".join([self.head, *more, ids, self.body])


Repeat = Callable[[str], Reply | None]
"""Takes `if-none-match`, empty if there is none, and returns the answer of this moment. Returns None if the application
must read the request: the key may have changed, or there is no answer yet.
"""


def offer_repeat(scope: MutableMapping[str, Any], repeat: Repeat) -> None:
    """Lets the connection answer the same request with `repeat`, if it can be repeated. `scope` is that of ASGI."""
    for name, value in scope["headers"]:
        if name in _SINGLE_USE and not (name == b"connection" and value.lower() == b"keep-alive"):
            return
    scope["state"][_REPEAT] = repeat


class LatestGet:
    """The latest request of a connection, if it was one GET that arrived in one piece."""

    __slots__ = ("_head", "_unconditional")

    def __init__(self, data: bytes) -> None:
        """`data` is what the connection received at the beginning of a request."""
        is_whole = data.startswith(b"GET ") and data.find(_END) == len(data) - len(_END)
        self._head = data if is_whole else b""
        self._unconditional: bytes | None = None
        """The head without `if-none-match`, once it was needed."""

    def repeated(self, data: bytes, state: Mapping[str, Any]) -> Reply | None:
        """Returns the answer to `data`, if that is the same request again. `state` is that of the latest request."""
        repeat: Repeat | None = state.get(_REPEAT)
        if repeat is None or not self._head:
            return None
        if self._unconditional is None:
            self._unconditional, _ = _split(self._head)
        head, condition = _split(data)
        return repeat(condition) if head == self._unconditional else None


def _split(head: bytes) -> tuple[bytes, str]:
    """Returns a head without `if-none-match`, and the value of that header."""
    found = _CONDITION.search(head)
    if found is None:
        return head, ""
    return head[: found.start()] + head[found.end() :], found[1].decode("latin-1").rstrip(" \t")
