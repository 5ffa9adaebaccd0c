"""Defines the messages that gateways put into the engine loop's inbox.

Messages from background threads (about loads, compiled grammars and copies) are defined in the files of these threads.
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
from graftwork.engine.lora.adapter_copies import AdapterCopied
from graftwork.engine.lora.loader import AdapterLoaded
from graftwork.engine.scheduler.first_token import Received
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId

Sink = Callable[[list[RequestOutput]], None]
"""A callback that receives the outputs of one step for one gateway. The engine loop's thread calls it."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Asks the engine to serve a request. The engine passes the outputs of the request to the callback `sink`."""

    request: EngineRequest
    sink: Sink
    received: Received | None = None
    """What the thread has found that received the request; None if the engine loop receives it."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Asks the engine to end a request. The request gets no further output."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelSink:
    """Asks the engine to cancel all requests whose outputs go to `sink`. Sent when a gateway disconnects."""

    sink: Sink


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """Asks the engine to free an adapter's memory, and to drop the stored answers of requests that used this adapter.

    The engine stores answers because it takes draft tokens from them.
    """

    digest: str


@dataclass(frozen=True, slots=True)
class ForgetDomain:
    """Asks the engine to drop all that it keeps of an isolation domain (a group of requests that may share cached KV).

    That is its cached KV on all tiers, its stored answers, its compiled grammars and the names of its tools.
    """

    domain: IsolationDomain


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """Asks the engine to load an adapter and to check that it computes the adapter's deltas correctly.

    `answer` is called on the loading thread. Its argument is the error, or None if all is well.
    """

    digest: str
    answer: Callable[[GraftworkError | None], None]


@dataclass(frozen=True, slots=True)
class RunSessionCommand:
    """Asks the engine to run a command on the cached KV of a session.

    The result is passed to `answer`, on the engine loop's thread.
    """

    command: SessionCommand
    answer: Callable[[SessionMemory], None]


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Asks for all counters and gauges of the engine. They are passed to `answer`, on the engine loop's thread."""

    answer: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """Tells the engine loop that a device can compute nothing any more. The engine's process must end."""

    cause: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks the engine loop to end. It does not wait for running requests."""


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
    | AdapterCopied
    | GrammarCompiled
    | LoadReadable
    | TransferDone
    | DeviceFailed
    | Stop
)
