"""Reads and writes the one stream between a gateway and an engine, and queues the events of each request.

    submit, leave ──► output socket, or Converse (gRPC) ──► engine
    inbox of each request ◄── steps ◄── output socket, or Converse

Owns the queues. Never ends the connection. Never retries.
Invariant: the events of one request come in their order, and one turn of the event loop hands out a bounded number.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import grpc
import grpc.aio

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.events import EngineEvent, StepsTraced, TokensGenerated
from graftwork.engine.core.load import LoadReport
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.rpc import codec
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.outputs import TICKET_KEY, OutputReader
from graftwork.platform.errors import DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import RequestId

_log = logging.getLogger(__name__)

TOKEN_REFUSED = "engine_token_refused"
"""The code of the error that a gateway raises if its token is not the engine's."""
RETRY_AFTER_S = 1.0
_WORK_PER_TURN = 32
"""How much work the readers of outputs may have in one turn of the event loop; a token is 1."""
_END_WORK = 8
"""The work that the first and the last event of a request make: an answer's start, or its usage row and its quota."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """What is told of messages that no request waits for."""

    on_step: Callable[[], None]
    """Is called when the outputs of a step arrive."""
    on_load: Callable[[LoadReport], None] | None = None
    """Is called with the engine's load, if a message has it."""


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
        self.is_beside = False
        """Whether the request was sent over the output socket. Then its cancel is too, so that it does not come first."""

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


class Conversation:
    """Reads and writes one Converse stream (see engine.proto): sends requests, and passes each reply to the reader of
    its request.
    """

    def __init__(
        self, converse: Any, metadata: tuple[tuple[str, str], ...], address: str, listeners: Listeners
    ) -> None:
        """`converse` opens the stream, with `metadata`."""
        self._converse = converse
        self._metadata = metadata
        self._address = address
        self._listeners = listeners
        self._inboxes: dict[str, _Inbox] = {}
        """The queue of each request's events, by request id."""
        self._outgoing: asyncio.Queue[wire.GatewayMessage] = asyncio.Queue()
        self._beside: OutputReader | None = None
        """The output socket; None without one."""
        self._steps: deque[Iterator[wire.RequestOutput]] = deque()
        """The outputs that were received and not handed out yet, step by step."""
        self._is_in_turn = False
        self._work = 0
        """The work that was handed out in this turn of the event loop."""
        self._reading = asyncio.create_task(self._read())
        self.is_over = False

    @property
    def has_requests(self) -> bool:
        return bool(self._inboxes)

    async def submit(self, request: EngineRequest) -> _Inbox:
        inbox = _Inbox()
        self._inboxes[request.request_id] = inbox
        inbox.is_beside = self._beside is not None and self._beside.takes_messages
        self._send(wire.GatewayMessage(submit=codec.request_to_wire(request)), inbox)
        return inbox

    def leave(self, request_id: RequestId, *, cancel: bool) -> None:
        """Stops listening for a request. If `cancel` is true, also asks the engine to cancel it. Never waits."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None and cancel and not self.is_over:
            self._send(wire.GatewayMessage(cancel=wire.Cancel(request_id=request_id)), inbox)

    def _send(self, message: wire.GatewayMessage, inbox: _Inbox) -> None:
        if inbox.is_beside and self._beside is not None:
            self._beside.send(message)
        else:
            self._outgoing.put_nowait(message)

    def lose(self, error: GraftworkError) -> None:
        """Ends all requests with `error`, and the stream with them. The engine then cancels the requests."""
        self.is_over = True
        self._steps.clear()
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
        self._beside = beside = await OutputReader.connect(self._address, self._take)
        ticket = () if beside is None else ((TICKET_KEY, beside.ticket),)
        call = self._converse(metadata=(*self._metadata, *ticket))
        writing = asyncio.create_task(self._write(call))
        try:
            if beside is None:
                async for step in call:
                    self._take(step)
            else:
                await _until_end(call, beside)
        except grpc.aio.AioRpcError as error:
            cause = error
        finally:
            call.cancel()
            writing.cancel()
            self._end(cause)

    def _end(self, cause: grpc.aio.AioRpcError | None) -> None:
        """Ends all requests, because the stream has ended."""
        loss = absent(self._address, cause, logging.DEBUG if self.is_over else logging.WARNING)
        self.is_over = True
        for output in chain.from_iterable(self._steps):
            self._put(output)
        self._steps.clear()
        for inbox in self._inboxes.values():
            inbox.put(loss)

    def _take(self, step: wire.StepOutput) -> None:
        """Takes a message of the engine."""
        self._listeners.on_step()
        if step.load_json and self._listeners.on_load is not None:
            self._listeners.on_load(LoadReport(partial(codec.load_from_json, step.load_json)))
        self._steps.append(iter(step.outputs))
        self._hand_out()

    def _hand_out(self) -> None:
        """Puts outputs of steps into the queues of their requests, and leaves what is too much to the loop's next turn.

        Otherwise the readers of all requests, or of several steps that have arrived together, would run in one turn of
        the loop, and what has just arrived, such as another tenant's request, would wait for all of them.
        """
        if not self._is_in_turn:
            self._is_in_turn = True
            asyncio.get_running_loop().call_soon(self._end_turn)
        while self._steps and self._work < _WORK_PER_TURN:
            for output in self._steps[0]:
                self._work += self._put(output)
                if self._work >= _WORK_PER_TURN:
                    break
            else:
                self._steps.popleft()

    def _end_turn(self) -> None:
        self._is_in_turn, self._work = False, 0
        if self._steps:
            self._hand_out()

    def _put(self, output: wire.RequestOutput) -> int:
        """Puts an output into the queue of its request. Returns the work that its reader will have."""
        inbox = self._inboxes.get(output.request_id)
        if inbox is None:
            return 0
        event = codec.event_from_wire(output)
        inbox.put(event)
        if isinstance(event, TokensGenerated):
            return 1
        return 0 if isinstance(event, StepsTraced) else _END_WORK  # a trace's reader has just been woken by its tokens


async def _until_end(call: Any, beside: OutputReader) -> None:
    """Waits until the output socket or the call ends. Raises the error with which the call ended."""
    call.add_done_callback(lambda _: beside.close())
    try:
        await beside.ended
        if call.done():
            await call.read()
    finally:
        beside.close()


def absent(address: str, error: grpc.aio.AioRpcError | None, level: int = logging.WARNING) -> Unavailable:
    """Returns the error for clients when no engine answers. Writes the address to the log only."""
    if error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED:
        _log.error("engine_token_refused", extra={"address": address})
        return Unavailable(
            "The engine refuses this gateway's token: give both the same GRAFTWORK_ENGINE_TOKEN.",
            code=TOKEN_REFUSED,
            retry_after_s=RETRY_AFTER_S,
        )
    reason = error.details() if error is not None else "the engine hung up"
    _log.log(level, "engine_absent", extra={"address": address, "reason": reason})
    return Unavailable(
        "No engine answers at present. It may be starting or restarting: try again shortly.",
        code=ENGINE_UNAVAILABLE,
        retry_after_s=RETRY_AFTER_S,
    )
