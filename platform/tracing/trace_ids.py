"""Reads the ids that a client gives its request, and makes those that it does not give.

    x-request-id    the client's own name of the request, repeated in the answer; the server's id stays the one that bills
    traceparent     the trace that the request belongs to (W3C Trace Context, version 00)

An id that is not well formed is ignored, as the Trace Context standard says for `traceparent`.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CLIENT_ID = 128
"""The most characters of an `x-request-id` that is honoured."""

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,%d}" % MAX_CLIENT_ID)
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The trace and the span that the client has begun, of which the request is a part."""

    trace_id: str
    """32 hexadecimal digits, not all 0."""
    span_id: str
    """16 hexadecimal digits, not all 0."""
    is_sampled: bool
    """Whether the client records its part of the trace."""


@dataclass(frozen=True, slots=True)
class TraceIds:
    """The ids of one request."""

    request_id: str
    """The server's own id."""
    trace_id: str
    """The client's trace, or a new one: 32 hexadecimal digits."""
    client_request_id: str | None = None
    """What the client calls the request; None if it gives no well-formed `x-request-id`."""
    parent: TraceParent | None = None
    asked: str | None = None
    """The value of `x-graftwork-trace`."""

    @property
    def shown_id(self) -> str:
        """The id that the answer has as `x-request-id`."""
        return self.client_request_id or self.request_id


def read_trace_ids(request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> TraceIds:
    """Returns the ids of the request with these headers, whose names are in lower case."""
    client_id = asked = parent = None
    for name, value in headers:
        if name == b"traceparent":
            parent = parse_traceparent(value)
        elif name == b"x-request-id":
            client_id = value.decode() if _CLIENT_ID.fullmatch(value) else None
        elif name == b"x-graftwork-trace":
            asked = value.decode("latin-1")
    trace_id = new_trace_id() if parent is None else parent.trace_id
    return TraceIds(request_id, trace_id, client_id, parent, asked)


def new_trace_id() -> str:
    """Returns a new id of a trace: 32 random hexadecimal digits."""
    return os.urandom(16).hex()


def parse_traceparent(value: bytes) -> TraceParent | None:
    """Returns the trace that the header names; None if the header is not well formed. Reads later versions as 00."""
    found = _TRACEPARENT.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & _SAMPLED))
