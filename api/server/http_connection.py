"""Reads HTTP requests from one connection: uvicorn's protocol over httptools, a parser that is written in C.

httptools accepts heads of any size, so this module limits them. Its refusals are JSON, as all errors of the server.
Invariant: one connection holds at most `MAX_HEAD_BYTES` and one read of the socket for a head.
"""

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""The largest head of a request: the request line and all headers, with the trailers of a chunked body."""

_LINGER_S = 1.0
"""How long a refused connection stays open. If it closed at once, unread data would make the client lose the answer."""

_REFUSAL = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


class HttpConnection(HttpToolsProtocol):
    """One client's connection. If a head is malformed or too large, the server answers and closes the connection."""

    _head_bytes = 0
    """The bytes of the finished parts of the head: the URL and whole headers."""
    _pending_bytes = 0
    """The bytes received since the parser last reported a part of a request. They may be one unfinished header."""
    _is_refused = False
    """Whether a refusal was sent. All further data is discarded."""

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > MAX_HEAD_BYTES and not self._is_refused:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses the request and closes the connection. uvicorn calls this if it cannot parse a request."""
        if max(self._head_bytes, self._pending_bytes) > MAX_HEAD_BYTES:
            self._refuse(
                b"431 Request Header Fields Too Large",
                "request_header_fields_too_large",
                f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes: send fewer or shorter headers.",
            )
        else:
            self._refuse(b"400 Bad Request", "bad_request", "The server cannot read this as an HTTP/1.1 request.")

    def _count_head(self, num_bytes: int) -> None:
        """Raises an error if the head is too large. The parser then stops, and uvicorn calls `send_400_response`."""
        self._pending_bytes = 0
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too large")

    def _refuse(self, status: bytes, code: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        self._is_refused = True
        self.transport.write(_REFUSAL % (status, len(body), body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
