"""Tests of an engine on a TCP port that demands a token."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestFinished
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc import engine_pb2_grpc
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.conversation import TOKEN_REFUSED
from graftwork.engine.rpc.engine_token import is_local
from graftwork.engine.rpc.server import EngineServer, serve_engine
from graftwork.platform.errors import InvalidRequest, Unavailable
from tests.engine.conftest import RandomModels
from tests.engine.rpc.test_server import request

TOKEN = "a-token-of-this-test"


@pytest.fixture
async def guarded(models: RandomModels) -> AsyncIterator[str]:
    """The address of an engine on a TCP port that demands the token."""
    server = EngineServer(models.engine().engine, "127.0.0.1:0", TOKEN)
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop()


async def test_a_gateway_with_the_token_is_served(guarded: str) -> None:
    """With the right token, streams and single calls work."""
    client = GrpcEngineClient(guarded, token=TOKEN)

    events = [event async for event in client.generate(request([5, 6]))]

    assert isinstance(events[-1], RequestFinished)
    assert (await client.stats()).generated_tokens == 6
    assert await client.stalled_s() == 0
    await client.close()


@pytest.mark.parametrize("token", [None, "another-token-of-this-test", TOKEN[:-1], TOKEN + "x"])
async def test_a_gateway_without_the_token_is_refused(guarded: str, token: str | None) -> None:
    """With no token or a wrong one, every kind of call is refused, with an error that says what to do."""
    client, owner = GrpcEngineClient(guarded, token=token), GrpcEngineClient(guarded, token=TOKEN)

    with pytest.raises(Unavailable, match="GRAFTWORK_ENGINE_TOKEN") as refused:
        await client.describe()
    with pytest.raises(Unavailable, match="GRAFTWORK_ENGINE_TOKEN"):
        _ = [event async for event in client.generate(request([5, 6]))]

    assert refused.value.code == TOKEN_REFUSED
    assert (await owner.stats()).prompt_tokens == 0
    await client.close()
    await owner.close()


async def test_no_method_of_the_service_is_open(guarded: str) -> None:
    """Every method of the gRPC service answers UNAUTHENTICATED without the token, also those that a client never calls."""
    methods = wire.DESCRIPTOR.services_by_name["Engine"].methods
    async with grpc.aio.insecure_channel(guarded) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        codes = {}
        for method in methods:
            message = getattr(wire, method.input_type.name)()
            if method.client_streaming:
                call = getattr(stub, method.name)(iter([message]))
                with suppress(grpc.aio.AioRpcError):
                    _ = [reply async for reply in call]
            else:
                call = getattr(stub, method.name)(message)
                with suppress(grpc.aio.AioRpcError):
                    await call
            codes[method.name] = await call.code()

    assert len(codes) >= 8
    assert set(codes.values()) == {grpc.StatusCode.UNAUTHENTICATED}


LOCAL = {
    "unix:/run/engine.sock": True,
    "127.0.0.1:9000": True,
    "127.8.0.1:0": True,
    "localhost:9000": True,
    "[::1]:9000": True,
    "ipv6:[::1]:9000": True,
    "dns:///localhost:9000": True,
    "0.0.0.0:9000": False,
    "[::]:9000": False,
    "10.0.0.5:9000": False,
    "engine-1:9000": False,
    "localhost.example.com:9000": False,
    ":9000": False,
    "nonsense": False,
}


@pytest.mark.parametrize("address", LOCAL)
def test_an_engine_that_others_reach_needs_a_token(address: str) -> None:
    """Only sockets and loopback addresses are local. At any other address, an engine without a token does not start."""
    assert is_local(address) == LOCAL[address]
    if not LOCAL[address]:
        with pytest.raises(InvalidRequest, match="GRAFTWORK_ENGINE_TOKEN") as refused:
            serve_engine(EngineConfig(model=Path("/nowhere")), lambda _: None, address)  # type: ignore[arg-type,return-value]
        assert refused.value.param == "engine_token"
