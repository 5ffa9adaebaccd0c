"""Serves an engine over gRPC: turns each call into a message for the engine loop, and sends the answers back.

Owns the gRPC server and the thread of the engine loop. Decides nothing about a request: the loop does.

Invariant: when a gateway disconnects, all its requests are cancelled.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from graftwork.engine.build.devices import ModelReading, keep_freed_memory
from graftwork.engine.build.engine import Engine, SourceFor, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.session_commands import SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.messages import (
    CancelRequest,
    CancelSink,
    ForgetAdapter,
    ForgetDomain,
    ProbeAdapter,
    ReadStats,
    RunSessionCommand,
    Sink,
    Stop,
    SubmitRequest,
)
from graftwork.engine.rpc import codec, engine_pb2_grpc
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.engine_tls import EngineTls, encrypts
from graftwork.engine.rpc.engine_token import TokenCheck, is_local
from graftwork.engine.rpc.outputs import TICKET_KEY, GrpcOutputs, OutputListener, Outputs
from graftwork.engine.rpc.watch import LoopWatch
from graftwork.engine.step_pipeline import DeviceLost
from graftwork.platform.errors import DEVICE_LOST, GraftworkError, InternalFailure, InvalidRequest
from graftwork.platform.ids import FIRST_GENERATION, IsolationDomain, RequestId
from graftwork.platform.memory import make_full_collections_rare

_log = logging.getLogger(__name__)

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),  # gateways ping as often as they like
]

_STOP_S = 0.5
"""How long the calls of gateways may go on when the server ends."""
STUCK_STATUS = 75
"""The exit status of an engine that has ended itself because its loop was stuck. In `sysexits.h` it means: try again."""

Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Passes messages from gateways to the engine loop, and the loop's outputs back to the gateways."""

    def __init__(self, engine: Engine, listener: OutputListener) -> None:
        self._listener = listener
        self._inbox = engine.loop.inbox
        self._arrivals = engine.loop.arrivals
        self._progress = engine.loop.progress
        self._memory = engine.memory
        self._phases = engine.phases
        self._description = engine.description
        self.epoch: int | None = None
        self.generation = FIRST_GENERATION

    async def Converse(  # noqa: N802 - gRPC's name
        self, messages: AsyncIterator[wire.GatewayMessage], context: Context
    ) -> AsyncIterator[wire.StepOutput]:
        """Serves one gateway until it disconnects. Then cancels all requests of this gateway."""
        outputs = await self._outputs_of(context)
        reading = asyncio.create_task(self._read(messages, outputs))
        try:
            while (message := await outputs.next_message()) is not None:
                yield message
        finally:
            reading.cancel()
            self._inbox.put(CancelSink(outputs))
            outputs.close()

    async def _outputs_of(self, context: Context) -> Outputs:
        for key, value in context.invocation_metadata() or ():
            if key == TICKET_KEY:
                return await self._listener.claim(str(value))
        return GrpcOutputs(self.load)

    def load(self) -> EngineLoad:
        """Returns the latest load of the engine, with its epoch and its age. Any thread may call this."""
        return replace(self._progress.load, epoch=self.epoch, age_s=round(self._progress.load_age_s, 4))

    async def _read(self, messages: AsyncIterator[wire.GatewayMessage], sink: Sink) -> None:
        async for message in messages:
            self.take(message, sink)

    def take(self, message: wire.GatewayMessage, sink: Sink) -> None:
        """Takes a message of a gateway. `sink` gets the outputs of its requests."""
        if message.WhichOneof("message") == "submit":
            self._submit(message.submit, sink)
        else:
            self._inbox.put(CancelRequest(RequestId(message.cancel.request_id)))

    def _submit(self, submit: wire.Submit, sink: Sink) -> None:
        try:
            request = codec.request_from_wire(submit)
        except ValueError as error:  # a field or value of another version
            refusal = InvalidRequest(
                f"The engine does not know what is asked: {error}. Run gateway and engine of one version."
            )
            sink([RequestOutput(RequestId(submit.request_id), refusal)])
            return
        try:
            received = self._arrivals.receive(request)
        except GraftworkError as error:
            sink([RequestOutput(request.request_id, error)])
        else:
            self._inbox.put(SubmitRequest(request, sink, received))

    async def Describe(self, request: wire.DescribeRequest, context: Context) -> wire.Description:  # noqa: N802
        return codec.description_to_wire(replace(self._description, epoch=self.epoch, generation=self.generation))

    async def ReadStats(self, request: wire.StatsRequest, context: Context) -> wire.Stats:  # noqa: N802
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[EngineStats] = event_loop.create_future()

        def settle(stats: EngineStats) -> None:
            event_loop.call_soon_threadsafe(_settle, answer, stats)

        self._inbox.put(ReadStats(settle))
        stats = await asyncio.to_thread(self._memory.complete, await answer)
        return codec.stats_to_wire(self._phases.complete(stats))

    async def ReadProgress(self, request: wire.ProgressRequest, context: Context) -> wire.Progress:  # noqa: N802
        return codec.progress_to_wire(self._progress.stalled_s, self.load())

    async def ProbeAdapter(  # noqa: N802
        self, request: wire.ProbeAdapterRequest, context: Context
    ) -> wire.ProbeAdapterReply:
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[GraftworkError | None] = event_loop.create_future()

        def settle(error: GraftworkError | None) -> None:
            event_loop.call_soon_threadsafe(_settle, answer, error)

        self._inbox.put(ProbeAdapter(request.digest, settle))
        error = await answer
        return wire.ProbeAdapterReply(failed=codec.error_to_wire(error) if error is not None else None)

    async def TendSession(self, request: wire.Tending, context: Context) -> wire.SessionMemory:  # noqa: N802
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[SessionMemory] = event_loop.create_future()

        def settle(memory: SessionMemory) -> None:
            event_loop.call_soon_threadsafe(_settle, answer, memory)

        self._inbox.put(RunSessionCommand(codec.command_from_wire(request), settle))
        return codec.memory_to_wire(await answer)

    async def ForgetAdapter(  # noqa: N802
        self, request: wire.ForgetAdapterRequest, context: Context
    ) -> wire.ForgetAdapterReply:
        self._inbox.put(ForgetAdapter(request.digest))
        return wire.ForgetAdapterReply()

    async def ForgetDomain(  # noqa: N802
        self, request: wire.ForgetDomainRequest, context: Context
    ) -> wire.ForgetDomainReply:
        self._inbox.put(ForgetDomain(IsolationDomain(request.isolation)))
        return wire.ForgetDomainReply()


def _settle(answer: "asyncio.Future[Any]", value: object) -> None:
    if not answer.done():  # the caller may have gone
        answer.set_result(value)


class EngineServer:
    """Runs the gRPC server and the thread of the engine loop."""

    def __init__(self, engine: Engine, listen: str, token: str | None = None, tls: EngineTls | None = None) -> None:
        """`listen` is a gRPC address: `unix:/path/engine.sock` or `host:port`. Port 0 takes a free one.

        If there is a `token`, calls without it are refused. With `tls`, connections to `host:port` are encrypted, and
        those without a certificate of its authority are refused.

        Raises InvalidRequest if the engine cannot listen there, or the files of `tls` cannot be used.
        """
        self._engine = engine
        checks = () if token is None else (TokenCheck(token),)
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=checks)
        self._listen = listen
        self._listener = OutputListener(lambda: self._servicer.load(), lambda *message: self._servicer.take(*message))
        self._servicer = EngineServicer(engine, self._listener)
        engine_pb2_grpc.add_EngineServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        try:
            if tls is not None and encrypts(listen):
                self.port = self._server.add_secure_port(listen, tls.server_credentials())
            else:
                self.port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise InvalidRequest(
                f"The engine cannot listen at {listen}: give another free address with --listen, unix:PATH or HOST:PORT.",
                param="listen",
            ) from error
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.has_died = asyncio.Event()
        """An event that is set when the loop has ended by an error. After that no request is served."""
        self.death: GraftworkError | None = None
        """The error with which the engine's process must end; None while the loop lives."""
        self.must_end = asyncio.Event()
        """An event that is set when the process must end in good order: by a signal, or because the engine has drained.
        """
        self.must_end_now = asyncio.Event()
        """An event that is set by a second signal: then running requests are not waited for."""

    @property
    def description(self) -> EngineDescription:
        return self._engine.description

    @property
    def load(self) -> EngineLoad:
        """The latest load of the engine, at most a moment old while it works."""
        return self._engine.loop.progress.load

    def fail(self, error: GraftworkError) -> None:
        """Ends the process with an error, because no gateway may use the engine."""
        self.death = error
        self.has_died.set()

    def note_signal(self) -> None:
        """Ends the process in good order, and at a second call at once."""
        if self.must_end.is_set():
            self.must_end_now.set()
        self.must_end.set()

    def join(self, epoch: int | None, generation: int = FIRST_GENERATION) -> None:
        """Tells gateways from now on that the engine has this epoch and this generation."""
        self._servicer.epoch, self._servicer.generation = epoch, generation

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()
        await self._listener.start(self._listen)
        await self._server.start()

    def _run(self) -> None:
        assert self._event_loop is not None
        try:
            self._engine.loop.run()
        except DeviceLost:
            _log.exception("device_lost")
            self.death = InternalFailure(
                "The engine's device can compute nothing after an error; the engine's log has it as `step_failed`. The "
                "engine must be started again.",
                code=DEVICE_LOST,
            )
        except Exception:  # noqa: BLE001 - the outermost loop: an engine without it must not seem to be alive
            _log.exception("engine_loop_died")
            self.death = InternalFailure(
                "The engine's loop ended by an error; its log says which. It must be started again."
            )
        if self.death is not None:
            self._event_loop.call_soon_threadsafe(self.has_died.set)

    async def stop(self) -> None:
        """Disconnects all gateways, then ends the engine loop and its thread.

        Tells the gateways first that the server ends. A connection without a call then closes in peace: gRPC would log
        a disconnection without that as an error of each gateway, also of one that has just closed its channel.
        """
        await self._server.stop(_STOP_S)
        await self._listener.close()
        self._engine.loop.inbox.put(Stop())
        await asyncio.to_thread(self._thread.join)


Membership = Callable[[EngineServer], AbstractAsyncContextManager[None]]
"""Makes an engine known to gateways for the time of an `async with` block, and tells the engine its epoch."""


def with_epoch(epoch: int | None, generation: int = FIRST_GENERATION) -> Membership:
    """Returns a membership for an engine without a lease of its own. `epoch` is what its supervisor has given it."""

    @asynccontextmanager
    async def joined(server: EngineServer) -> AsyncGenerator[None]:
        server.join(epoch, generation)
        yield

    return joined


def serve_engine(
    config: EngineConfig,
    source_for: SourceFor,
    listen: str,
    token: str | None = None,
    step_limit_s: float | None = None,
    membership: "Membership | None" = None,
    tls: EngineTls | None = None,
    reading: ModelReading | None = None,
) -> None:
    """Builds an engine and serves it at the address `listen`, until the process gets SIGTERM or SIGINT.

    `source_for` makes the source from which the engine loads adapters. If there is a `token`, the engine obeys only
    gateways that send it. `step_limit_s`, `membership` and `tls` are those of `run_server`, and `reading` is that of
    `build_engine`.

    Raises InvalidRequest if other machines can reach the address and there is neither a token nor `tls`.
    """
    if token is None and tls is None and not is_local(listen):
        raise InvalidRequest(
            f"An engine at {listen} needs a token, because other machines can reach it: set GRAFTWORK_ENGINE_TOKEN to "
            "one secret for the engine and its gateways, such as the output of `openssl rand -hex 32`, or give both "
            "certificates with --engine-tls-ca, --engine-tls-cert and --engine-tls-key.",
            param="engine_token",
        )
    if tls is not None:
        tls.check()
    keep_freed_memory()
    asyncio.run(
        run_server(build_engine(config, source_for, reading=reading), listen, token, step_limit_s, membership, tls)
    )


async def run_server(
    engine: Engine,
    listen: str,
    token: str | None,
    step_limit_s: float | None,
    membership: "Membership | None" = None,
    tls: EngineTls | None = None,
) -> None:
    """Serves an engine until the process gets SIGTERM or SIGINT.

    If the loop works for more than `step_limit_s` seconds without advancing, ends the process with STUCK_STATUS, so that
    whoever started it can start it again. If it is None, another process has this duty. `membership` is open while the
    engine serves. With `tls`, connections that come by TCP are encrypted, and both ends prove who they are.

    Raises InternalFailure if the loop ends by an error.
    """
    server = EngineServer(engine, listen, token, tls)
    stopping = server.must_end
    watch = None if step_limit_s is None else _watch(engine, step_limit_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.note_signal)
    await server.start()
    make_full_collections_rare()
    if watch is not None:
        watch.start()
    async with nullcontext() if membership is None else membership(server):
        engine.phases.report()
        _log.info("engine_ready", extra={"listen": listen, "model": engine.description.model_name})
        waits = [asyncio.create_task(event.wait()) for event in (stopping, server.has_died)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    if watch is not None:
        await watch.close()
    if server.death is not None:
        raise server.death
    await server.stop()


def _watch(engine: Engine, step_limit_s: float) -> LoopWatch:
    """Returns a watch that ends this process if the engine's loop is stuck."""

    async def read_stall() -> float:
        return engine.loop.progress.stalled_s

    def end() -> None:
        _log.critical("engine_stuck", extra={"limit_s": step_limit_s, "stalled_s": engine.loop.progress.stalled_s})
        faulthandler.dump_traceback()
        logging.shutdown()
        os._exit(STUCK_STATUS)  # the loop's thread cannot be ended in any other way

    return LoopWatch(read_stall, step_limit_s, lambda: True, end)
