"""Describes the SDK's input and output as data. Never reads or sends anything itself.

An effect is an object that describes one action, such as sending a request. Each method of the SDK is a generator,
which yields effects and receives their results. `runtimes.py` performs the effects, with or without `await`, so both
clients share all other code.
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
    """One HTTP request that the SDK has not sent yet."""

    method: str
    path: str
    json: Mapping[str, Any] | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    """The query parameters. The SDK does not send parameters with the value None."""
    form: Mapping[str, str] | None = None
    files: Mapping[str, Any] | None = None
    content: bytes | None = None
    """The body as it is, instead of JSON or a form."""
    headers: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False
    """Whether to send the admin key instead of the tenant's key."""
    creates: bool = False
    """Whether the call creates something. The SDK then adds an Idempotency-Key, so that it can repeat the call."""

    def with_headers(self, **headers: str) -> "Call":
        """Returns a copy of the call with more headers.

        In a name, `_` becomes `-`: `idempotency_key` sets `idempotency-key`.
        """
        added = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **added})


def deadline_header(deadline_ms: int | None) -> dict[str, str]:
    """Returns the header that tells the server in how many milliseconds the first token must come. None sends none."""
    return {} if deadline_ms is None else {"x-deadline-ms": str(deadline_ms)}


@dataclass(slots=True, eq=False)
class Connection:
    """The HTTP response that a stream of events reads. A runtime sets the response, and closes it at the end."""

    response: httpx.Response | None = None
    chunks: Any = None


@dataclass(frozen=True, slots=True)
class Send:
    """An effect that sends an HTTP request and reads the whole answer. The result is an httpx.Response.

    Raises APIConnectionError if no answer comes.
    """

    call: Call


@dataclass(frozen=True, slots=True)
class OpenStream:
    """An effect that sends an HTTP request and opens the answer as a stream. The result is an httpx.Response.

    Sets `connection`. Reads only the headers of a successful answer, but the whole body of an error.
    Raises APIConnectionError if no answer comes.
    """

    call: Call
    connection: Connection


@dataclass(frozen=True, slots=True)
class ReadStream:
    """An effect that reads from an open stream. The result is the next bytes, or None at the end of the stream.

    Raises APIConnectionError if the connection breaks.
    """

    connection: Connection


@dataclass(frozen=True, slots=True)
class CloseStream:
    """An effect that closes an open stream before its end. The result is None."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class Sleep:
    """An effect that waits for a number of seconds. The result is None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RunTools:
    """An effect that runs the user's functions for these tool calls, all at the same time.

    The result is a list of ToolOutput, in the order of the calls.
    """

    calls: tuple[PendingCall, ...]
    tools: Tools
    timeout: ToolTimeout


@dataclass(frozen=True, slots=True)
class Opened:
    """An effect that reports that the server has accepted the request of a stream. The caller then gets the stream."""


@dataclass(frozen=True, slots=True)
class Emit(Generic[T]):
    """An effect that gives one event to the code that iterates over the stream."""

    event: T


Effect = Send | OpenStream | ReadStream | CloseStream | Sleep | RunTools | Opened | Emit[Any]
Steps = Generator[Effect, Any, T]
"""The generator of one method of the SDK. It yields effects, and returns the method's result, a T."""
