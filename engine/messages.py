"""The messages that other threads put into the engine loop's inbox."""

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
"""Takes one gateway's outputs of one step; called on the loop's thread, so it must only hand them over."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelSink:
    """A gateway is gone: cancel everything that it submitted."""

    sink: Sink


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    digest: str


@dataclass(frozen=True, slots=True)
class ForgetDomain:
    """Drop all cached KV of a domain."""

    domain: IsolationDomain


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """Load an adapter and prove that it is applied exactly; `answer` is called on the loading thread."""

    digest: str
    answer: Callable[[GraftworkError | None], None]


@dataclass(frozen=True, slots=True)
class RunSessionCommand:
    """Look after a session's KV between its turns; `answer` is called on the loop's thread."""

    command: SessionCommand
    answer: Callable[[SessionMemory], None]


@dataclass(frozen=True, slots=True)
class ReadStats:
    answer: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


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
