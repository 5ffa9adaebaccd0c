"""Tests of how a client shares its event loop between the readers of one large step and everything else."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from graftwork.engine.core.events import FinishReason, RequestFinished, TokensGenerated
from graftwork.engine.rpc import codec, engine_pb2_grpc
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.platform.ids import RequestId
from tests.engine.rpc.test_server import request

NUM_REQUESTS = 200


class OneStepEngine(engine_pb2_grpc.EngineServicer):
    """Answers all requests in two messages: one with a token for each, and one with the end of each."""

    async def Converse(  # noqa: N802 - gRPC's name
        self, messages: AsyncIterator[wire.GatewayMessage], context: Any
    ) -> AsyncIterator[wire.StepOutput]:
        request_ids = [RequestId((await anext(messages)).submit.request_id) for _ in range(NUM_REQUESTS)]
        for event in (TokensGenerated((7,)), RequestFinished(FinishReason.STOP, 1)):
            yield wire.StepOutput(outputs=[codec.output_to_wire(request_id, event) for request_id in request_ids])
        async for _ in messages:
            pass


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[GrpcEngineClient]:
    server, address = grpc.aio.server(), f"unix:{tmp_path}/engine.sock"
    engine_pb2_grpc.add_EngineServicer_to_server(OneStepEngine(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    opened = GrpcEngineClient(address)
    yield opened
    await opened.close()
    await server.stop(grace=None)


@pytest.mark.parametrize(("event", "most"), [(TokensGenerated, 64), (RequestFinished, 16)])
async def test_a_large_step_leaves_turns_of_the_loop_to_others(
    client: GrpcEngineClient, event: type[TokensGenerated | RequestFinished], most: int
) -> None:
    """What becomes ready with the first reader of 200 runs before a third of them, and before a tenth if they end."""
    order: list[str] = []

    async def read() -> None:
        async for found in client.generate(request([1, 2, 3])):
            if isinstance(found, event):
                if not order:
                    asyncio.get_running_loop().call_soon(order.append, "other")
                order.append("reader")

    await asyncio.gather(*(read() for _ in range(NUM_REQUESTS)))

    assert order.count("reader") == NUM_REQUESTS
    assert order.index("other") <= most
