"""The SDK's I/O as data.

Each operation is a generator that yields effects and receives their results. `runtimes.py` performs them, with or
without `await`, so both clients share all other code. This module does no I/O.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import httpx

from graftwork.api.sdk.transport.tools import Tools, ToolTimeout
from graftwork.platform.answers.sessions import PendingCall

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request that is still to be sent."""

    method: str
    path: str
    json: Mapping[str, Any] | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    """None values are left out."""
    form: Mapping[str, str] | None = None
    files: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False
    """Sent with the admin key instead of the tenant's."""
    creates: bool = False
    """A POST that creates something. It has an Idempotency-Key, so that it can be repeated."""

    def with_headers(self, **headers: str) -> "Call":
        """A copy with more headers; `idempotency_key` is sent as `idempotency-key`."""
        added = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **added})


@dataclass(slots=True, eq=False)
class Connection:
    """The response that a stream reads. A runtime sets it and closes it."""

    response: httpx.Response | None = None
    chunks: Any = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send, and read the whole answer. Result: httpx.Response. Raises APIConnectionError."""

    call: Call


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Send, and read only the headers of a success. Result: httpx.Response. Raises APIConnectionError."""

    call: Call
    connection: Connection


@dataclass(frozen=True, slots=True)
class ReadStream:
    """Result: the next bytes, or None at the end. Raises APIConnectionError."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class Sleep:
    """Result: None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run the user's functions at the same time. Result: list of ToolOutput, in the order of the calls."""

    calls: tuple[PendingCall, ...]
    tools: Tools
    timeout: ToolTimeout


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream's request was accepted, so the caller gets its stream."""


@dataclass(frozen=True, slots=True)
class Emit(Generic[T]):
    """Give one event to the code that iterates the stream."""

    event: T


Effect = Send | OpenStream | ReadStream | Sleep | RunTools | Opened | Emit[Any]
Steps = Generator[Effect, Any, T]
"""An operation that ends with a T."""
