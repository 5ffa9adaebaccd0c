"""Tests of the output socket, and of the gRPC stream in its place."""

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from graftwork.engine.core.events import (
    EngineEvent,
    FinishReason,
    RequestFinished,
    RequestOutput,
    TokenLogprobs,
    TokensGenerated,
)
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.rpc import codec, engine_pb2_grpc
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.outputs import TICKET_KEY, OutputListener, OutputReader, SocketOutputs
from graftwork.engine.rpc.server import EngineServer
from graftwork.platform.ids import RequestId
from tests.engine.conftest import RandomModels
from tests.engine.rpc.test_server import request, until

NUM_REQUESTS = 200


@pytest.fixture
async def address(models: RandomModels, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a served engine."""
    listen = f"unix:{tmp_path}/engine.sock"
    server = EngineServer(models.engine().engine, listen)
    await server.start()
    yield listen
    await server.stop()


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[OutputListener]:
    """Listens beside `unix:{tmp_path}/engine.sock`."""
    opened = OutputListener()
    await opened.start(f"unix:{tmp_path}/engine.sock")
    yield opened
    await opened.close()


def numbered(number: int) -> list[RequestOutput]:
    """The outputs of one step, which no other number has."""
    return [RequestOutput(RequestId("req_x"), TokensGenerated((number,) * (1 + number % 50)))]


class Connected:
    """A gateway's end of an output socket, and the messages that have come."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._steps: asyncio.Queue[wire.StepOutput] = asyncio.Queue()

    async def open(self) -> "Connected":
        reader = await OutputReader.connect(self._address, self._steps.put_nowait)
        assert reader is not None
        self.reader = reader
        self.ticket, self.close = reader.ticket, reader.close
        return self

    async def steps(self) -> AsyncIterator[wire.StepOutput]:
        while True:
            yield await self._steps.get()


async def connected(address: str) -> Connected:
    return await Connected(address).open()


async def first(steps: AsyncIterator[wire.StepOutput], count: int) -> list[wire.StepOutput]:
    return [await anext(steps) for _ in range(count)]


async def test_the_outputs_of_a_call_with_a_ticket_come_over_the_socket(address: str) -> None:
    """A call with the ticket of a connection gets its tokens there, the same as a call without one gets over gRPC."""
    asked = wire.GatewayMessage(submit=codec.request_to_wire(request([5, 6, 7], max_tokens=8)))

    async def tokens(steps: AsyncIterator[wire.StepOutput]) -> list[int]:
        found: list[int] = []
        async for step in steps:
            for output in step.outputs:
                found.extend(output.tokens.token_ids)
                if output.HasField("finished"):
                    return found
        raise AssertionError("the outputs ended before the request")

    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        reader = await connected(address)
        beside = stub.Converse(metadata=((TICKET_KEY, reader.ticket),))
        await beside.write(asked)
        over_socket = await tokens(reader.steps())
        plain = stub.Converse()
        await plain.write(asked)
        over_grpc = await tokens(aiter(plain))
        reader.close()

        assert over_socket == over_grpc
        assert len(over_socket) == 8
        assert not await beside.read()  # the end of the call, which is false; a message is true


async def test_closing_the_socket_cancels_the_requests_of_its_call(address: str) -> None:
    """If a gateway closes its output socket, the call ends, and its requests leave the engine."""
    client = GrpcEngineClient(address)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        reader = await connected(address)
        call = stub.Converse(metadata=((TICKET_KEY, reader.ticket),))
        await call.write(wire.GatewayMessage(submit=codec.request_to_wire(request([5] * 20, max_tokens=200))))
        await anext(reader.steps())

        reader.close()

        assert not await call.read()  # the end of the call
        stats = await until(client, lambda stats: stats.running_requests + stats.waiting_requests == 0)
        assert stats.active_pages == 0
    await client.close()


async def test_a_slow_gateway_gets_every_output_in_order(listener: OutputListener, tmp_path: Path) -> None:
    """Of far more outputs than a socket holds, sent by another thread before the first is read, none is lost or moved."""
    reader = await connected(f"unix:{tmp_path}/engine.sock")
    outputs = await listener.claim(reader.ticket)
    count = 12_000

    def send() -> None:
        for number in range(count):
            outputs(numbered(number))

    sending = threading.Thread(target=send)
    sending.start()
    sending.join()

    steps = await first(reader.steps(), count)

    assert steps == [codec.step_to_wire(numbered(number)) for number in range(count)]
    outputs(numbered(7))
    assert await anext(reader.steps()) == codec.step_to_wire(numbered(7))
    reader.close()
    assert await outputs.next_message() is None


async def test_new_outputs_wait_behind_unsent_ones() -> None:
    """If the socket has room again while older outputs are unsent, newer ones do not overtake them."""
    ours, gateways = socket.socketpair()
    outputs = SocketOutputs(ours)
    for number in range(12_000):
        outputs(numbered(number))
    received = gateways.recv(100_000)  # the event loop does not run here, so it has sent nothing yet
    for number in range(12_000, 12_100):
        outputs(numbered(number))

    sent = [codec.step_to_wire(numbered(number)).SerializeToString() for number in range(12_100)]
    expected = b"".join(struct.pack(">I", len(message)) + message for message in sent)
    gateways.setblocking(False)
    while len(received) < len(expected):
        received += await asyncio.get_running_loop().sock_recv(gateways, 1 << 20)

    assert received == expected
    outputs.close()
    gateways.close()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
async def test_messages_are_read_in_pieces_of_any_size(size: int) -> None:
    """Whatever pieces the system gives of the stream, each message arrives once and whole, as soon as it is there."""
    found: list[wire.StepOutput] = []
    reader = OutputReader(found.append)
    sent = [codec.step_to_wire(numbered(number)) for number in range(40)]
    content = b"".join(struct.pack(">I", message.ByteSize()) + message.SerializeToString() for message in sent)

    for start in range(0, len(content), size):
        reader.data_received(content[start : start + size])

    assert found == sent


async def test_the_engines_load_comes_with_some_tokens() -> None:
    """The first message to a gateway has the engine's load, and those that follow within a tenth of a second do not."""
    ours, gateways = socket.socketpair()
    outputs = SocketOutputs(ours, lambda: EngineLoad(epoch=3, queued_tokens=7))
    for number in range(3):
        outputs(numbered(number))

    found: list[wire.StepOutput] = []
    OutputReader(found.append).data_received(gateways.recv(100_000))

    assert codec.load_from_json(found[0].load_json) == EngineLoad(epoch=3, queued_tokens=7)
    assert not found[1].load_json
    assert [step.outputs[0].request_id for step in found] == ["req_x"] * 3
    outputs.close()
    gateways.close()


def test_a_step_is_the_list_of_its_outputs() -> None:
    """The message of a step holds each output as it is converted alone: tokens, no tokens, tokens with logprobs, an end."""
    events: list[EngineEvent] = [
        TokensGenerated((3, 70_000)),
        TokensGenerated(()),
        TokensGenerated((5,), (TokenLogprobs(-0.5, ((5, -0.5),)),)),
        RequestFinished(FinishReason.STOP, 3),
    ]
    step = [RequestOutput(RequestId(f"req_{number}"), event) for number, event in enumerate(events)]

    found = codec.step_to_wire(step)

    assert [*found.outputs] == [codec.output_to_wire(output.request_id, output.event) for output in step]


async def test_outputs_for_a_gateway_that_is_gone_are_dropped() -> None:
    """Outputs that come after the gateway has closed its end, or after `close`, raise nothing."""
    ours, gateways = socket.socketpair()
    outputs = SocketOutputs(ours)
    outputs(numbered(1))

    gateways.close()
    outputs(numbered(2))
    outputs.close()
    outputs(numbered(3))
    outputs.close()

    assert ours.fileno() == -1


async def test_a_ticket_finds_its_own_connection(listener: OutputListener, tmp_path: Path) -> None:
    """A call may come before its connection, and gets the connection of its own ticket."""
    address = f"unix:{tmp_path}/engine.sock"
    reader, other = await connected(address), await connected(address)
    late = asyncio.create_task(listener.claim("f" * 32))
    outputs = await listener.claim(reader.ticket)
    (await listener.claim(other.ticket))(numbered(2))
    outputs(numbered(1))
    third, writer = await asyncio.open_unix_connection(f"{tmp_path}/engine.sock.out")
    writer.write(b"f" * 32)
    (await late)(numbered(3))

    assert await anext(reader.steps()) == codec.step_to_wire(numbered(1))
    assert await anext(other.steps()) == codec.step_to_wire(numbered(2))
    (length,) = struct.unpack(">I", await third.readexactly(4))
    assert wire.StepOutput.FromString(await third.readexactly(length)) == codec.step_to_wire(numbered(3))
    for one in (reader, other):
        one.close()
    writer.close()


async def test_a_second_connection_with_a_ticket_is_closed(listener: OutputListener, tmp_path: Path) -> None:
    """A connection with a ticket that another connection has gets no outputs and is closed."""
    reader = await connected(f"unix:{tmp_path}/engine.sock")
    strangers, writer = await asyncio.open_unix_connection(f"{tmp_path}/engine.sock.out")
    writer.write(reader.ticket.encode())

    assert await strangers.read() == b""
    (await listener.claim(reader.ticket))(numbered(5))

    assert await anext(reader.steps()) == codec.step_to_wire(numbered(5))
    reader.close()
    writer.close()


async def test_an_engine_without_an_output_socket_serves_over_grpc(
    models: RandomModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the output socket's path is too long for the system, the engine logs that, and gateways are served over gRPC."""
    folder = tmp_path / ("x" * (92 - len(str(tmp_path))))
    folder.mkdir()
    listen = f"unix:{folder}/engine.sock01"  # 106 bytes; the system allows 107
    with caplog.at_level(logging.WARNING):
        server = EngineServer(models.engine().engine, listen)
        await server.start()
        client = GrpcEngineClient(listen)
        events = [event async for event in client.generate(request([5, 6]))]
        await client.close()
        await server.stop()

    assert isinstance(events[-1], RequestFinished)
    assert "engine_has_no_output_socket" in caplog.text


class ManyStepsEngine(engine_pb2_grpc.EngineServicer):
    """Answers each request with a token, in a step of its own, and then all with their ends."""

    def __init__(self, listener: OutputListener) -> None:
        self._listener = listener

    async def Converse(  # noqa: N802 - gRPC's name
        self, messages: AsyncIterator[wire.GatewayMessage], context: Any
    ) -> AsyncIterator[wire.StepOutput]:
        outputs = await self._listener.claim(str(dict(context.invocation_metadata())[TICKET_KEY]))
        request_ids = [RequestId((await anext(messages)).submit.request_id) for _ in range(NUM_REQUESTS)]
        for event in (TokensGenerated((7,)), RequestFinished(FinishReason.STOP, 1)):
            for request_id in request_ids:
                outputs([RequestOutput(request_id, event)])
        while (message := await outputs.next_message()) is not None:
            yield message


async def test_many_small_steps_leave_turns_of_the_loop_to_others(listener: OutputListener, tmp_path: Path) -> None:
    """Of 200 steps that arrive together, a third at most is read before what becomes ready with the first."""
    server, address = grpc.aio.server(), f"unix:{tmp_path}/engine.sock"
    engine_pb2_grpc.add_EngineServicer_to_server(ManyStepsEngine(listener), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    client = GrpcEngineClient(address)
    order: list[str] = []

    async def read() -> None:
        async for found in client.generate(request([1, 2, 3])):
            if isinstance(found, TokensGenerated):
                if not order:
                    asyncio.get_running_loop().call_soon(order.append, "other")
                order.append("reader")

    await asyncio.gather(*(read() for _ in range(NUM_REQUESTS)))
    await client.close()
    await server.stop(grace=None)

    assert order.count("reader") == NUM_REQUESTS
    assert order.index("other") <= NUM_REQUESTS // 3
