"""Tests of messages to the engine over the output socket, and over gRPC in its place."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest

from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.rpc import codec, engine_pb2_grpc
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.outputs import TICKET_KEY, OutputListener, Outputs
from graftwork.platform.ids import RequestId
from tests.engine.rpc.test_server import request


class NotingEngine(engine_pb2_grpc.EngineServicer):
    """Answers each request with a token, and notes which message has come by which way."""

    def __init__(self, folder: Path, *, invites: bool, expects: int) -> None:
        """`has_noted_all` is set once it has noted so many messages."""
        self._expects = expects
        self.has_noted_all = asyncio.Event()
        self.listener = OutputListener(on_message=self.take) if invites else OutputListener()
        self.address = f"unix:{folder}/engine.sock"
        self.noted: list[tuple[str, str, str]] = []
        self._server = grpc.aio.server()

    async def __aenter__(self) -> Self:
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(self.address)
        await self.listener.start(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(grace=None)
        await self.listener.close()

    def take(self, message: wire.GatewayMessage, outputs: Outputs, way: str = "socket") -> None:
        kind = str(message.WhichOneof("message"))
        self.noted.append((way, kind, getattr(message, kind).request_id))
        if len(self.noted) == self._expects:
            self.has_noted_all.set()
        if kind == "submit":
            outputs([RequestOutput(RequestId(message.submit.request_id), TokensGenerated((7,)))])

    async def Converse(  # noqa: N802 - gRPC's name
        self, messages: AsyncIterator[wire.GatewayMessage], context: Any
    ) -> AsyncIterator[wire.StepOutput]:
        outputs = await self.listener.claim(str(dict(context.invocation_metadata())[TICKET_KEY]))
        async for message in messages:
            self.take(message, outputs, "gRPC")
        while (step := await outputs.next_message()) is not None:
            yield step


@pytest.mark.parametrize("invites", [True, False])
async def test_messages_go_over_the_socket_once_the_engine_says_so(tmp_path: Path, invites: bool) -> None:
    """The first request goes over gRPC, and later ones over the socket if the engine takes them; a cancel goes the same way
    as its request.
    """
    later = "socket" if invites else "gRPC"
    asked = [request([1, 2, 3]) for _ in range(3)]
    async with NotingEngine(tmp_path, invites=invites, expects=2 * len(asked)) as engine:
        client = GrpcEngineClient(engine.address)
        streams = [client.generate(one) for one in asked]
        for stream in streams:
            await anext(stream)
        for stream in reversed(streams):
            await stream.aclose()
        await engine.has_noted_all.wait()
        await client.close()

    ways = dict(zip((one.request_id for one in asked), ("gRPC", later, later), strict=True))
    assert sorted(engine.noted) == sorted(
        (way, kind, request_id) for request_id, way in ways.items() for kind in ("submit", "cancel")
    )


async def test_a_connection_without_a_call_is_not_heard(tmp_path: Path) -> None:
    """Messages that come before a call has claimed their connection, or after it has ended, are dropped with it."""
    taken: list[object] = []
    listener = OutputListener(on_message=lambda message, outputs: taken.append(message))
    await listener.start(f"unix:{tmp_path}/engine.sock")
    content = wire.GatewayMessage(submit=codec.request_to_wire(request([1]))).SerializeToString()
    for is_claimed in (False, True):
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/engine.sock.out")
        writer.write(b"a" * 32)
        if is_claimed:
            outputs = await listener.claim("a" * 32)
            await reader.readexactly(4)
            outputs.close()
        writer.write(struct.pack(">I", len(content)) + content)

        await reader.read()
        writer.close()
    await listener.close()

    assert taken == []


@pytest.mark.parametrize("sent", [struct.pack(">I", 3) + b"\xff\xff\xff", struct.pack(">I", 2**31), b"\0"])
async def test_what_is_no_message_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    """A gateway that sends no message, one that is too long, or a part of one loses its connection and nothing else."""
    taken: list[object] = []
    listener = OutputListener(on_message=lambda message, outputs: taken.append(message))
    await listener.start(f"unix:{tmp_path}/engine.sock")
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/engine.sock.out")
    writer.write(b"a" * 32)
    outputs = await listener.claim("a" * 32)
    writer.write(sent)
    writer.write_eof()

    assert await outputs.next_message() is None
    await reader.read()
    writer.close()
    await listener.close()
    assert taken == []
