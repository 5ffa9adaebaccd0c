"""Implements EngineClient over gRPC.

Owns the connection, and one stream for all requests. The stream is opened at first use, and again after it was lost.
Never retries a request: if the engine is lost, raises Unavailable, and the caller decides whether to try again.
Invariant: no request waits for a frozen engine. Pings find a process that is stopped, and a LoopWatch finds a process
whose loop is stuck.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import EngineEvent, RequestFinished
from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.progress import DEFAULT_FREEZE_LIMITS, FreezeLimits
from graftwork.engine.core.reports import NO_REPORTS, RequestReports, note_event
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.rpc import codec, engine_pb2_grpc
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.conversation import RETRY_AFTER_S, Conversation, Listeners, absent
from graftwork.engine.rpc.engine_tls import EngineTls, encrypts
from graftwork.engine.rpc.engine_token import call_metadata
from graftwork.engine.rpc.forecasts import FirstTokenForecasts
from graftwork.engine.rpc.queue_rooms import QueueRooms
from graftwork.engine.rpc.watch import LoopWatch, look_every_s
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.errors import CapacityContended, DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import IsolationDomain

_log = logging.getLogger(__name__)

_OPTIONS = [
    (
        "grpc.http2.bdp_probe",
        0,
    ),  # no pings to tune bulk transfers: a step's message is a few kilobytes
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # how long an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_ANSWER_WITHIN_S = 10.0
_PROBED_WITHIN_S = 120.0
_SESSION_COMMAND_WITHIN_S = 3.0
"""Seconds to wait for a session command. A turn of a session does not end before its command does."""

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
        clock: Clock | None = None,
    ) -> None:
        """`address` is a gRPC target: `unix:/path/engine.sock` or `host:port`. `token` is the engine's secret.

        With `tls`, connections to `host:port` are encrypted and both ends prove who they are. Raises InvalidRequest if
        its files cannot be used.
        """
        self._address = address
        self._metadata = call_metadata(token)
        self._channel = _open_channel(address, [*_OPTIONS, *_pings(limits.silence_s)], tls)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)  # type: ignore[no-untyped-call]
        self._conversation: Conversation | None = None
        self._look_within_s = look_every_s(limits.step_s)
        self._stalled_s = 0.0
        self._is_closed = False
        self._forecasts, self._rooms = FirstTokenForecasts(clock or SystemClock()), QueueRooms(clock or SystemClock())
        self._reports: RequestReports = NO_REPORTS
        self._followers: list[Callable[[LoadReport], None]] = [self._forecasts.note, self._rooms.note]
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
                raise absent(self._address, error, logging.DEBUG) from error
            self._stalled_s += self._look_within_s
        else:
            self._stalled_s = progress.stalled_s
        return self._stalled_s

    async def read_load(self, within_s: float) -> EngineLoad:
        """Returns the latest load of the engine. Raises Unavailable if it does not answer in `within_s` seconds."""
        progress = await self._ask(self._stub.ReadProgress, wire.ProgressRequest(), within_s)
        return codec.load_from_json(progress.load_json)

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
        self._refuse_hopeless(request)
        conversation, report = self._open_conversation(), self._reports.begin(request)
        inbox = await conversation.submit(request)
        self._forecasts.sent(request)
        self._rooms.sent(request)
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
                    if isinstance(event, CapacityContended):
                        self._forecasts.refused(request, event)
                        self._rooms.refused(request)
                    if isinstance(event, GraftworkError):
                        raise event
                note_event(report, event)
                yield event
        finally:
            report.end()
            if timer is not None:
                timer.cancel()
            conversation.leave(request.request_id, cancel=not ended)

    def refuse_early(self, newcomer: Newcomer) -> None:
        if newcomer.deadline_s is not None:
            self._forecasts.check_line(newcomer.line, newcomer.deadline_s)
        self._rooms.check(newcomer.domain)
        self._forecasts.coming(newcomer.line)
        self._rooms.coming(newcomer.domain)

    def _refuse_hopeless(self, request: EngineRequest) -> None:
        """Raises CapacityContended if the engine would refuse the request. One that has begun an answer elsewhere may wait."""
        self._forecasts.come(request)
        self._rooms.come(request)
        self._forecasts.check(request)
        if not request.emitted_token_ids:
            self._rooms.check(request.domain, len(request.prompt_token_ids))

    def report_to(self, reports: RequestReports) -> None:
        """Notes the events of all requests that are sent from now on."""
        self._reports = reports

    def follow_load(self, note: Callable[[LoadReport], None]) -> None:
        """Calls `note` with each load that the engine sends with its tokens. Call this before the first request."""
        self._followers.append(note)

    def lose_requests(self) -> None:
        """Ends all running requests with the error of a lost engine, and cancels them there. The connection stays."""
        if self._conversation is not None:
            self._conversation.lose(absent(self._address, None, logging.DEBUG))

    async def close(self) -> None:
        self._is_closed = True
        await self._watch.close()
        if self._conversation is not None:
            await self._conversation.close()
        await self._channel.close(grace=None)

    def _open_conversation(self) -> "Conversation":
        if self._conversation is None or self._conversation.is_over:
            listeners = Listeners(self._note_step, self._note_load)
            self._conversation = Conversation(self._stub.Converse, self._metadata, self._address, listeners)
        return self._conversation

    def _note_step(self) -> None:
        self._stalled_s = 0.0
        self._watch.note_advance()

    def _note_load(self, report: LoadReport) -> None:
        for note in self._followers:
            note(report)

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
            raise absent(self._address, error, logging.DEBUG) from error  # callers poll while an engine starts
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            raise absent(self._address, None, logging.DEBUG) from None  # gRPC cancels the calls of a closed channel


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
        retry_after_s=RETRY_AFTER_S,
    )


def _open_channel(address: str, options: list[tuple[str, object]], tls: EngineTls | None) -> grpc.aio.Channel:
    if tls is not None and encrypts(address):
        return tls.open_channel(address, options)
    return grpc.aio.insecure_channel(address, options=options)
