"""Describes the SDK's input and output as data. Never reads or sends anything itself.

An effect is an object that describes one action, such as sending a request. Each operation is a generator, which yields
effects and receives their results. `runtimes.py` performs the effects, with or without `await`, so both clients share
all other code.
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
    headers: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False
    """Whether to send the admin key instead of the tenant's key."""
    creates: bool = False
    """Whether the call creates something. The SDK then adds an Idempotency-Key, so that it can repeat the call."""

    def with_headers(self, **headers: str) -> "Call":
        """Returns a copy with more headers. `_` in a name becomes `-`: `idempotency_key` sets `idempotency-key`."""
        added = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **added})


@dataclass(slots=True, eq=False)
class Connection:
    """The open response that a stream reads. A runtime sets the response and closes it."""

    response: httpx.Response | None = None
    chunks: Any = None


@dataclass(frozen=True, slots=True)
class Send:
    """Sends the call and reads the whole answer. The result is an httpx.Response. Raises APIConnectionError."""

    call: Call


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Sends the call and opens its answer as a stream. The result is an httpx.Response. Raises APIConnectionError.

    Reads only the headers of a successful answer, but the whole body of an error.
    """

    call: Call
    connection: Connection


@dataclass(frozen=True, slots=True)
class ReadStream:
    """Reads from an open stream. The result is the next bytes, or None at the end. Raises APIConnectionError."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class Sleep:
    """Waits for a number of seconds. The result is None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RunTools:
    """Runs the user's functions, all at the same time.

    The result is a list of ToolOutput, in the order of the calls.
    """

    calls: tuple[PendingCall, ...]
    tools: Tools
    timeout: ToolTimeout


@dataclass(frozen=True, slots=True)
class Opened:
    """Reports that the server has accepted a stream's request. The caller then gets the stream."""


@dataclass(frozen=True, slots=True)
class Emit(Generic[T]):
    """Gives one event to the code that iterates over the stream."""

    event: T


Effect = Send | OpenStream | ReadStream | Sleep | RunTools | Opened | Emit[Any]
Steps = Generator[Effect, Any, T]
"""A generator that yields effects and returns a T."""
