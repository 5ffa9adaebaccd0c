"""Implements EngineClient over gRPC.

Owns the connection, and one stream for all requests. The stream is opened at first use, and again after it was lost.
Never retries a request: if the engine is lost, raises Unavailable, and the caller decides whether to try again.
Invariant: no request waits for a frozen engine. Pings find a process that is stopped, and a LoopWatch finds a process
whose loop is stuck.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.events import EngineEvent, RequestFinished
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.progress import DEFAULT_FREEZE_LIMITS, FreezeLimits
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.rpc import codec, engine_pb2_grpc
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.engine_tls import EngineTls, encrypts
from graftwork.engine.rpc.engine_token import call_metadata
from graftwork.engine.rpc.outputs import TICKET_KEY, OutputReader
from graftwork.engine.rpc.watch import LoopWatch, look_every_s
from graftwork.platform.errors import DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId

_log = logging.getLogger(__name__)

_OPTIONS = [
    (
        "grpc.http2.bdp_probe",
        0,
    ),  # no pings to tune bulk transfers: a step's message is a few kilobytes
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
TOKEN_REFUSED = "engine_token_refused"
"""The code of the error that a gateway raises if its token is not the engine's."""
_RETRY_AFTER_S = 1.0
_ANSWER_WITHIN_S = 10.0
_PROBED_WITHIN_S = 120.0
_SESSION_COMMAND_WITHIN_S = 3.0
"""Seconds to wait for a session command. A turn of a session does not end before its command does."""

_WORK_PER_TURN = 32
"""How much work the readers of outputs may have in one turn of the event loop; a token is 1."""
_END_WORK = 8
"""The work that the first and the last event of a request make: an answer's start, or its usage row and its quota."""

_LAST = (RequestFinished, GraftworkError)
"""The kinds of the last event of a request."""


class GrpcEngineClient:
    """Implements EngineClient for the engine at one gRPC address. Each client may be used from one event loop only."""

    def __init__(
        self,
        address: str,
        limits: FreezeLimits = DEFAULT_FREEZE_LIMITS,
        token: str | None = None,
        tls: EngineTls | None = None,
    ) -> None:
        """`address` is a gRPC target: `unix:/path/engine.sock` or `host:port`. `token` is the engine's secret.

        With `tls`, connections to `host:port` are encrypted and both ends prove who they are. Raises InvalidRequest if
        its files cannot be used.
        """
        self._address = address
        self._metadata = call_metadata(token)
        self._channel = _open_channel(address, [*_OPTIONS, *_pings(limits.silence_s)], tls)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)  # type: ignore[no-untyped-call]
        self._conversation: _Conversation | None = None
        self._look_within_s = look_every_s(limits.step_s)
        self._stalled_s = 0.0
        self._is_closed = False
        self._watch = LoopWatch(self.stalled_s, limits.step_s, self._has_requests, self._lose_conversation)

    async def describe(self) -> EngineDescription:
        return codec.description_from_wire(await self._ask(self._stub.Describe, wire.DescribeRequest()))

    async def stats(self) -> EngineStats:
        return codec.stats_from_wire(await self._ask(self._stub.ReadStats, wire.StatsRequest()))

    async def stalled_s(self) -> float:
        """Returns the seconds since the engine's loop last advanced. If the engine's process lives and does not answer
        this, adds the time that the call has waited to the last answer.
        """
        try:
            progress = await self._stub.ReadProgress(
                wire.ProgressRequest(), timeout=self._look_within_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._stalled_s = 0.0
                raise _absent(self._address, error, logging.DEBUG) from error
            self._stalled_s += self._look_within_s
        else:
            self._stalled_s = progress.stalled_s
        return self._stalled_s

    async def read_load(self, within_s: float) -> EngineLoad:
        """Returns the latest load of the engine. Raises Unavailable if it does not answer in `within_s` seconds."""
        return codec.load_from_wire(await self._ask(self._stub.ReadProgress, wire.ProgressRequest(), within_s))

    async def forget_adapter(self, digest: str) -> None:
        await self._ask(self._stub.ForgetAdapter, wire.ForgetAdapterRequest(digest=digest))

    async def forget_domain(self, domain: IsolationDomain) -> None:
        await self._ask(self._stub.ForgetDomain, wire.ForgetDomainRequest(isolation=domain))

    async def probe_adapter(self, digest: str) -> None:
        reply = await self._ask(self._stub.ProbeAdapter, wire.ProbeAdapterRequest(digest=digest), _PROBED_WITHIN_S)
        if reply.HasField("failed"):
            raise codec.error_from_wire(reply.failed)

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        return codec.memory_from_wire(
            await self._ask(self._stub.TendSession, codec.command_to_wire(command), _SESSION_COMMAND_WITHIN_S)
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        if self._watch.is_stuck:
            raise _stuck()
        conversation = self._open_conversation()
        inbox = await conversation.submit(request)
        self._watch.start()
        timer = inbox.end_after(request.timeout_s)
        ended = False
        try:
            while not ended:
                while not inbox.events:
                    await inbox.news.wait()
                event = inbox.events.popleft()
                if isinstance(event, _LAST):
                    ended = not isinstance(event, DeadlineExceeded)
                    if isinstance(event, GraftworkError):
                        raise event
                yield event
        finally:
            if timer is not None:
                timer.cancel()
            conversation.leave(request.request_id, cancel=not ended)

    def lose_requests(self) -> None:
        """Ends all running requests with the error of a lost engine, and cancels them there. The connection stays."""
        if self._conversation is not None:
            self._conversation.lose(_absent(self._address, None, logging.DEBUG))

    async def close(self) -> None:
        self._is_closed = True
        await self._watch.close()
        if self._conversation is not None:
            await self._conversation.close()
        await self._channel.close(grace=None)

    def _open_conversation(self) -> "_Conversation":
        if self._conversation is None or self._conversation.is_over:
            self._conversation = _Conversation(self._stub.Converse, self._metadata, self._address, self._note_step)
        return self._conversation

    def _note_step(self) -> None:
        self._stalled_s = 0.0
        self._watch.note_advance()

    def _has_requests(self) -> bool:
        return self._conversation is not None and self._conversation.has_requests

    def _lose_conversation(self) -> None:
        """Ends all requests, because the engine's loop is stuck. If it goes on, it finds them cancelled."""
        _log.error("engine_stuck", extra={"address": self._address, "stalled_s": self._stalled_s})
        if self._conversation is not None:
            self._conversation.lose(_stuck())

    async def _ask(self, method: Any, message: Any, within_s: float = _ANSWER_WITHIN_S) -> Any:
        try:
            return await method(message, timeout=within_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _absent(self._address, error, logging.DEBUG) from error  # callers poll while an engine starts
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            raise _absent(self._address, None, logging.DEBUG) from None  # gRPC cancels the calls of a closed channel


class Wakeup:
    """Lets one task wait for a signal. `wake` wakes the task that waits; if no task waits, the call of `wake` is lost.

    This replaces asyncio.Event, which costs several times as much. The gateway waits for every token of every stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        """Returns a future that the next call of `wake` completes. Await the future at once.

        A `wake` before this call is lost. So check before this call whether there is anything to wait for.
        """
        self._waiter = asyncio.Future(loop=self._loop)
        return self._waiter

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Inbox:
    """Queues the events of one request for its only reader. The length of the queue has no limit."""

    def __init__(self) -> None:
        self.events: deque[EngineEvent | GraftworkError] = deque()
        self.news = Wakeup()

    def put(self, event: EngineEvent | GraftworkError) -> None:
        self.events.append(event)
        self.news.wake()

    def end_after(self, seconds: float | None) -> asyncio.TimerHandle | None:
        """Puts the error of a passed time limit into the queue after `seconds`. None sets no limit."""
        if seconds is None:
            return None
        return asyncio.get_running_loop().call_later(seconds, self._put_late, seconds)

    def _put_late(self, seconds: float) -> None:
        self.put(
            DeadlineExceeded(
                f"The request took longer than {seconds:g} seconds, this server's limit: ask for fewer tokens, "
                "or send it again when the server is less busy."
            )
        )


class _Conversation:
    """Reads and writes one Converse stream (see engine.proto): sends requests, and passes each reply to the reader of
    its request.
    """

    def __init__(
        self, converse: Any, metadata: tuple[tuple[str, str], ...], address: str, on_step: Callable[[], None]
    ) -> None:
        """`converse` opens the stream, with `metadata`. `on_step` is called when the outputs of a step arrive."""
        self._converse = converse
        self._metadata = metadata
        self._address = address
        self._on_step = on_step
        self._inboxes: dict[str, _Inbox] = {}
        """The queue of each request's events, by request id."""
        self._outgoing: asyncio.Queue[wire.GatewayMessage] = asyncio.Queue()
        self._work = 0
        """The work that was handed out since the last pause for the event loop."""
        self._reading = asyncio.create_task(self._read())
        self.is_over = False

    @property
    def has_requests(self) -> bool:
        return bool(self._inboxes)

    async def submit(self, request: EngineRequest) -> _Inbox:
        inbox = _Inbox()
        self._inboxes[request.request_id] = inbox
        self._outgoing.put_nowait(wire.GatewayMessage(submit=codec.request_to_wire(request)))
        return inbox

    def leave(self, request_id: RequestId, *, cancel: bool) -> None:
        """Stops listening for a request. If `cancel` is true, also asks the engine to cancel it. Never waits."""
        self._inboxes.pop(request_id, None)
        if cancel and not self.is_over:
            self._outgoing.put_nowait(wire.GatewayMessage(cancel=wire.Cancel(request_id=request_id)))

    def lose(self, error: GraftworkError) -> None:
        """Ends all requests with `error`, and the stream with them. The engine then cancels the requests."""
        self.is_over = True
        for inbox in self._inboxes.values():
            inbox.put(error)
        self._reading.cancel()

    async def close(self) -> None:
        self.is_over = True
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._end(None)  # the reader may never have begun

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader meets the same error and reports it

    async def _read(self) -> None:
        cause: grpc.aio.AioRpcError | None = None
        beside = await OutputReader.connect(self._address)
        ticket = () if beside is None else ((TICKET_KEY, beside.ticket),)
        call = self._converse(metadata=(*self._metadata, *ticket))
        writing = asyncio.create_task(self._write(call))
        try:
            async for step in call if beside is None else _steps_beside(call, beside):
                self._on_step()
                await self._hand_out(step.outputs)
        except grpc.aio.AioRpcError as error:
            cause = error
        finally:
            call.cancel()
            writing.cancel()
            self._end(cause)

    def _end(self, cause: grpc.aio.AioRpcError | None) -> None:
        """Ends all requests, because the stream has ended."""
        loss = _absent(self._address, cause, logging.DEBUG if self.is_over else logging.WARNING)
        self.is_over = True
        for inbox in self._inboxes.values():
            inbox.put(loss)

    async def _hand_out(self, outputs: Iterable[wire.RequestOutput]) -> None:
        """Puts the outputs of a step into the queues of their requests.

        Lets the event loop run from time to time. Otherwise the readers of all requests, or of several steps that have
        arrived together, would run in one turn of the loop, and what has just arrived, such as another tenant's
        request, would wait for all of them.
        """
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is None:
                continue
            inbox.put(codec.event_from_wire(output))
            self._work += 1 if output.HasField("tokens") else _END_WORK
            if self._work >= _WORK_PER_TURN:
                self._work = 0
                await asyncio.sleep(0)


async def _steps_beside(call: Any, beside: OutputReader) -> AsyncGenerator[wire.StepOutput, None]:
    """Yields the steps from an output socket until it or the call ends. Raises the error with which the call ended."""
    call.add_done_callback(lambda _: beside.close())
    try:
        async for step in beside.steps():
            yield step
        if call.done():
            await call.read()
    finally:
        beside.close()


def _pings(silence_s: float) -> list[tuple[str, int]]:
    """Returns the channel's options for pings. A process that answers none for `silence_s` seconds is given up."""
    half_ms = max(int(silence_s * 500), 1)
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),  # or the keepalive ping waits for 60 s
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _stuck() -> Unavailable:
    """Returns the error for clients when the engine's process lives, and its loop does nothing."""
    return Unavailable(
        "The engine has made no progress for a long time. It may be restarted: try again shortly.",
        code=ENGINE_UNAVAILABLE,
        retry_after_s=_RETRY_AFTER_S,
    )


def _open_channel(address: str, options: list[tuple[str, object]], tls: EngineTls | None) -> grpc.aio.Channel:
    if tls is not None and encrypts(address):
        return tls.open_channel(address, options)
    return grpc.aio.insecure_channel(address, options=options)


def _absent(address: str, error: grpc.aio.AioRpcError | None, level: int = logging.WARNING) -> Unavailable:
    """Returns the error for clients when no engine answers. Writes the address to the log only."""
    if error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED:
        _log.error("engine_token_refused", extra={"address": address})
        return Unavailable(
            "The engine refuses this gateway's token: give both the same GRAFTWORK_ENGINE_TOKEN.",
            code=TOKEN_REFUSED,
            retry_after_s=_RETRY_AFTER_S,
        )
    reason = error.details() if error is not None else "the engine hung up"
    _log.log(level, "engine_absent", extra={"address": address, "reason": reason})
    return Unavailable(
        "No engine answers at present. It may be starting or restarting: try again shortly.",
        code=ENGINE_UNAVAILABLE,
        retry_after_s=_RETRY_AFTER_S,
    )
