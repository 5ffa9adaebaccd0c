"""Defines the messages that other threads put into the engine loop's inbox.

Owns the messages from gateways. Messages from background threads (about loads, compiled grammars and copies) are
defined in the files of these threads.

Invariant: a callback in a message only passes its argument on. It must not block the thread that calls it.
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
"""A callback that receives the outputs of one step for one gateway. The engine loop's thread calls it."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Asks the engine to serve a request, and to pass its outputs to the callback `sink`."""

    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Asks the engine to end a request without any further output."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelSink:
    """Asks the engine to cancel all requests whose outputs go to `sink`, because this gateway has disconnected."""

    sink: Sink


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """Asks the engine to free an adapter's memory, and to drop the answers that requests with this adapter got.

    The engine keeps such answers because it takes drafts from them.
    """

    digest: str


@dataclass(frozen=True, slots=True)
class ForgetDomain:
    """Asks the engine to drop all cached KV of an isolation domain (a group of requests that may share cached KV)."""

    domain: IsolationDomain


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """Asks the engine to load an adapter, and to check that it is applied exactly.

    `answer` is called on the loading thread, with the error or None.
    """

    digest: str
    answer: Callable[[GraftworkError | None], None]


@dataclass(frozen=True, slots=True)
class RunSessionCommand:
    """Asks the engine to run a command on the KV of a session. `answer` is called on the engine loop's thread."""

    command: SessionCommand
    answer: Callable[[SessionMemory], None]


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Asks for all counters and gauges of the engine. `answer` is called on the engine loop's thread."""

    answer: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks the engine loop to end, without waiting for running requests."""


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
