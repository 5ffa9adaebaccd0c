"""The messages that other threads put into the engine loop's inbox.

Owns what gateways ask for. What background threads report comes from their own rooms: loads, compiles, transfers.
Invariant: a callback in a message only hands its argument over; it must not block the thread that calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.grammar.compile.compiler import GrammarCompiled
from graftwork.engine.kv.transfer.plan import LoadReadable, TransferDone
from graftwork.engine.lora.loader import AdapterLoaded
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId

Sink = Callable[[list[RequestOutput]], None]
"""Takes one gateway's outputs of one step. Called on the loop's thread."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Serve a request, and put its outputs into `sink`."""

    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End a request without an output."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelSink:
    """Cancel all requests of a gateway that has disconnected."""

    sink: Sink


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """Free an adapter's memory, and drop what was cached under it."""

    digest: str


@dataclass(frozen=True, slots=True)
class ForgetDomain:
    """Drop all cached KV of a domain."""

    domain: IsolationDomain


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """Load an adapter and check that it is applied exactly. `answer` is called on the loading thread."""

    digest: str
    answer: Callable[[GraftworkError | None], None]


@dataclass(frozen=True, slots=True)
class RunSessionCommand:
    """Carry out a session command. `answer` is called on the loop's thread."""

    command: SessionCommand
    answer: Callable[[SessionMemory], None]


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Read all counters and gauges. `answer` is called on the loop's thread."""

    answer: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop, without waiting for running requests."""


Message = (
    SubmitRequest
    | CancelRequest
    | CancelSink
    | ForgetAdapter
    | ForgetDomain
    | ProbeAdapter
    | RunSessionCommand
    | ReadStats
    | AdapterLoaded
    | GrammarCompiled
    | LoadReadable
    | TransferDone
    | Stop
)
