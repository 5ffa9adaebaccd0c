"""Carries the outputs of the engine's steps to a gateway, and its messages to the engine: over the gateway's gRPC stream, or
beside it over a socket.

    gateway  ── Converse (gRPC): pings, token, ticket ──────────────────────────────────────────►  engine
             ◄── output socket: length, StepOutput, length, StepOutput, … ───────────────────────
             ─── output socket: ticket, length, GatewayMessage, length, GatewayMessage, … ────────►

A gateway on the engine's machine opens an output socket, if it can reach the engine over a Unix-domain socket. Then the
engine loop's own thread writes each step's outputs, in one system call. Over gRPC, other Python threads write them. They
take the interpreter from the loop for a tenth of a step of a small model. A request over gRPC takes several threads of
the gateway, and a sixth of a millisecond of its processor.

The output socket is the gRPC socket's path with `.out` at the end. A gateway names its connection by a random ticket: it
sends the ticket over the connection, and with its Converse call. So the token that protects Converse protects the
outputs too. The connection and the call end together: if one ends, its reader ends the other.
An engine that takes messages over the socket says so in its first one (`takes_messages`), once the call has claimed the
connection. Until then, and to an engine of an older version, messages go over gRPC.

Owns both ends of the output socket. Never cancels a request: the server does, when `next_message` has returned None.
"""

import asyncio
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self, cast

from google.protobuf.message import DecodeError

from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.rpc import codec
from graftwork.engine.rpc import engine_pb2 as wire

_log = logging.getLogger(__name__)

TICKET_KEY = "output-ticket"
"""The key of the ticket in the metadata of Converse."""
_TICKET_BYTES = 16
_LENGTH = struct.Struct(">I")
"""Stands before each message: the number of its bytes."""
_LOAD_EVERY_S = 0.1
"""Seconds between two messages with the engine's load."""
_MOST_BYTES = 64 * 2**20
"""The longest message of a gateway, as over gRPC."""

ReadLoad = Callable[[], EngineLoad]
OnStep = Callable[[wire.StepOutput], None]
OnMessage = Callable[[wire.GatewayMessage, "Outputs"], None]


class _LoadReports:
    """Says when a gateway should get the engine's load again, with the tokens of a step."""

    def __init__(self, read: ReadLoad | None) -> None:
        self._read = read
        self._sent_at = float("-inf")

    def due(self) -> EngineLoad | None:
        """Returns the load, if the last one is old; else None."""
        now = time.monotonic()
        if self._read is None or now - self._sent_at < _LOAD_EVERY_S:
            return None
        self._sent_at = now
        return self._read()


class Outputs(Protocol):
    """A Sink (see engine/messages.py) for one gateway, and the event loop's end of it."""

    def __call__(self, step: list[RequestOutput]) -> None:
        """Sends the outputs of a step, or keeps them to be sent. Any thread may call this. Never blocks."""
        ...

    async def next_message(self) -> wire.StepOutput | None:
        """Returns the next message to send over gRPC; None if the gateway listens no more."""
        ...

    def close(self) -> None:
        """Drops what is not sent. Outputs that come later are dropped, too."""
        ...


class GrpcOutputs:
    """Implements Outputs with the messages of a Converse stream."""

    def __init__(self, read_load: ReadLoad | None = None) -> None:
        self._load = _LoadReports(read_load)
        self._event_loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[list[RequestOutput]] = asyncio.Queue()

    def __call__(self, step: list[RequestOutput]) -> None:
        self._event_loop.call_soon_threadsafe(self._steps.put_nowait, step)

    async def next_message(self) -> wire.StepOutput | None:
        return codec.step_to_wire(await self._steps.get(), self._load.due())

    def close(self) -> None:
        self._steps = asyncio.Queue()


class SocketOutputs:
    """Implements Outputs with a gateway's connection to the output socket. No message goes over gRPC.

    If the gateway reads too slowly, the event loop sends the rest. Later outputs then wait behind it, in memory.
    """

    def __init__(self, connection: socket.socket, read_load: ReadLoad | None = None) -> None:
        """Owns `connection`. `read_load` returns the engine's load, which some messages carry."""
        connection.setblocking(False)
        self._load = _LoadReports(read_load)
        self._connection = connection
        self._event_loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._lock = threading.Lock()
        """Guards the fields below, and the order of what is sent."""
        self._unsent = bytearray()
        self._is_open = True
        self.takes_messages = False
        """Whether the gateway may send its messages over this connection."""

    def __call__(self, step: list[RequestOutput]) -> None:
        self._put(codec.step_to_wire(step, self._load.due()))

    def invite_messages(self) -> None:
        """Lets the gateway send its messages over this connection. Its call must have been let in."""
        self.takes_messages = True
        self._put(wire.StepOutput(takes_messages=True))

    def _put(self, message: wire.StepOutput) -> None:
        frame = _frame(message)
        with self._lock:
            if not self._is_open:
                return
            if self._unsent:
                self._unsent += frame
                return
            self._unsent += frame[self._send(frame) :]
            if self._unsent:
                self._event_loop.call_soon_threadsafe(self._await_room)

    async def next_message(self) -> wire.StepOutput | None:
        await self._gone.wait()
        return None

    def close(self) -> None:
        self.takes_messages = False
        self._gone.set()
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._unsent.clear()
                self._event_loop.remove_writer(self._connection)
                self._connection.close()

    def _await_room(self) -> None:
        with self._lock:
            if self._is_open:
                self._event_loop.add_writer(self._connection, self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            del self._unsent[: self._send(self._unsent)]
            if not self._unsent:
                self._event_loop.remove_writer(self._connection)

    def _send(self, content: bytes | bytearray) -> int:
        """Returns how many bytes are done with: all, if the gateway is gone."""
        try:
            return self._connection.send(content)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(content)


class OutputListener:
    """Listens at an engine's output socket, and finds each gateway's connection by its ticket."""

    def __init__(self, read_load: ReadLoad | None = None, on_message: OnMessage | None = None) -> None:
        """`read_load` returns the engine's load, which some messages carry. None sends none. `on_message` takes each message
        that comes over a connection, with the outputs of the same. None takes messages over gRPC alone.
        """
        self._read_load = read_load
        self._on_message = on_message
        self._arrivals: dict[str, asyncio.Future[SocketOutputs]] = {}
        """The connections that no call has claimed, and those that calls wait for, by ticket."""
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()
        """One task for each connection."""

    async def start(self, address: str) -> None:
        """Listens beside the gRPC address `address`. If that is not possible, logs why, and gateways use gRPC alone."""
        path = _output_path(address)
        if path is None:
            return
        try:
            self._server = await asyncio.start_unix_server(self._visit, path)
        except OSError as error:  # such as a path that is too long
            _log.warning("engine_has_no_output_socket", extra={"path": str(path), "reason": str(error)})

    async def claim(self, ticket: str) -> SocketOutputs:
        """Returns the outputs that go to the connection with this ticket, for a call that was let in. Waits until the
        connection is there. From then on, messages may come over it.
        """
        arrival = self._arrivals.setdefault(ticket, asyncio.get_running_loop().create_future())
        try:
            outputs = await arrival
        finally:
            self._arrivals.pop(ticket, None)
        if self._on_message is not None:
            outputs.invite_messages()
        return outputs

    async def close(self) -> None:
        """Stops listening, and leaves all gateways."""
        if self._server is not None:
            self._server.close()
        visits = [*self._visits]
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until the gateway closes it."""
        visit = asyncio.current_task()
        assert visit is not None
        self._visits.add(visit)
        try:
            ticket = (await reader.readexactly(2 * _TICKET_BYTES)).decode("ascii", errors="replace")
            await self._attend(ticket, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # nobody waits for it
        except DecodeError:
            _log.warning("gateway_sent_no_message")
        finally:
            self._visits.discard(visit)
            writer.close()

    async def _attend(self, ticket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrival = self._arrivals.setdefault(ticket, asyncio.get_running_loop().create_future())
        if arrival.done():
            return  # a second connection with a ticket is a stranger's
        file = writer.get_extra_info("socket").fileno()
        outputs = SocketOutputs(socket.fromfd(file, socket.AF_UNIX, socket.SOCK_STREAM), self._read_load)
        arrival.set_result(outputs)
        try:
            await self._read_messages(reader, outputs)
        finally:
            outputs.close()
            if self._arrivals.get(ticket) is arrival:
                del self._arrivals[ticket]

    async def _read_messages(self, reader: asyncio.StreamReader, outputs: SocketOutputs) -> None:
        """Takes the messages of a gateway until it sends something that it may not send."""
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if self._on_message is None or not outputs.takes_messages or length > _MOST_BYTES:
                return
            self._on_message(wire.GatewayMessage.FromString(await reader.readexactly(length)), outputs)


class OutputReader(asyncio.Protocol):
    """A gateway's end of an output socket. Calls `on_step` with each message, in the callback that has received it: a
    task that waits for messages would cost more than a message does.
    """

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None
        self.ticket = secrets.token_hex(_TICKET_BYTES)
        self.takes_messages = False
        """Whether the engine has said that `send` may be used."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Is done when either end is closed."""

    @classmethod
    async def connect(cls, address: str, on_step: OnStep) -> Self | None:
        """Connects beside the gRPC address `address`. Returns None if no output socket is there."""
        path = _output_path(address)
        if path is None:
            return None
        try:
            _, reader = await asyncio.get_running_loop().create_unix_connection(lambda: cls(on_step), str(path))
        except OSError:
            return None  # the engine is of another version or away; gRPC finds out which
        return reader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self.ticket.encode())

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        start, size = 0, len(unread)
        while size - start >= _LENGTH.size:
            first = start + _LENGTH.size
            end = first + _LENGTH.unpack_from(unread, start)[0]
            if end > size:
                break
            step = wire.StepOutput.FromString(bytes(unread[first:end]))
            self.takes_messages = self.takes_messages or step.takes_messages
            self._on_step(step)
            start = end
        del unread[:start]

    def send(self, message: wire.GatewayMessage) -> None:
        """Sends a message to an engine that takes it here. Never waits. Does nothing if the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_frame(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.close()


def _frame(message: wire.StepOutput | wire.GatewayMessage) -> bytes:
    content = message.SerializeToString()
    return _LENGTH.pack(len(content)) + content


def _output_path(address: str) -> Path | None:
    """Returns the path of the output socket beside a gRPC address; None if the address is not a Unix-domain socket."""
    return Path(address.removeprefix("unix:").removeprefix("//") + ".out") if address.startswith("unix:") else None
