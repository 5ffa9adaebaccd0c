"""Sends the head of an answer and what follows at once by one write.

    head  ─► held ─┐
    body  ─► held ─┼─► one write        of a short answer, or of the first events of a stream
    event ─► held ─┘

A write to a client on this machine costs as much as a hundred lines of Python, and one to another machine half of that.
Owns what is held: for two turns of the event loop, so that another task of the same request can add its first event, which
it writes in the turn after the head. Never changes the order of what is written, and never holds much: from
`_MOST_HELD_BYTES` on it writes at once, so that the limits of the transport's own buffer hold.
"""

import asyncio
from typing import Any

_MOST_HELD_BYTES = 64 * 1024


class GatheredWrites:
    """A transport that holds what is written for two turns of the event loop. All else is done by the transport that it is
    made of.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._loop.call_soon, self.flush)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= _MOST_HELD_BYTES:
            self.flush()

    def write_on(self, data: bytes) -> None:
        """Writes `data` with what is held; if nothing is, at once. Is for what comes alone, such as a token of a stream."""
        if self._held:
            self.write(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Writes what is held."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()
