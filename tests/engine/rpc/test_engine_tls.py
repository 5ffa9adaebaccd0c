"""Tests of an engine whose connections are encrypted and that demands a certificate of its gateways."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestFinished
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.engine_tls import EngineTls
from graftwork.engine.rpc.server import EngineServer, serve_engine
from graftwork.platform.errors import InvalidRequest, Unavailable
from tests.certificates import NAME, Authority
from tests.engine.conftest import RandomModels
from tests.engine.rpc.test_server import request


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
async def guarded(models: RandomModels, authority: Authority) -> AsyncIterator[str]:
    """The address of an engine that speaks TLS and demands certificates of the authority."""
    server = EngineServer(models.engine().engine, "127.0.0.1:0", tls=authority.issue("engine"))
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop()


async def error_of(address: str, tls: EngineTls | None) -> Unavailable | None:
    """The error of a client with these files; None if it is served."""
    client = GrpcEngineClient(address, tls=tls)
    try:
        await client.describe()
    except Unavailable as error:
        return error
    finally:
        await client.close()
    return None


async def test_a_gateway_with_a_certificate_of_the_authority_is_served(guarded: str, authority: Authority) -> None:
    """With certificates of one authority on both ends, streams and single calls work."""
    client = GrpcEngineClient(guarded, tls=authority.issue("gateway", dns="gateway.internal"))

    events = [event async for event in client.generate(request([5, 6]))]

    assert isinstance(events[-1], RequestFinished)
    assert (await client.stats()).generated_tokens == 6
    await client.close()


async def test_strangers_are_refused(guarded: str, authority: Authority, tmp_path: Path) -> None:
    """Neither a plain client, nor one without a certificate, nor one with another authority's certificate is served."""
    stranger = replace(Authority(tmp_path, "theirs").issue("gateway"), ca=authority.ca)

    assert await error_of(guarded, None) is not None
    assert await error_of(guarded, stranger) is not None
    host, port = guarded.split(":")
    assert await asyncio.to_thread(reads_nothing, host, int(port), ssl.create_default_context(cafile=authority.ca))
    assert await error_of(guarded, authority.issue("gateway")) is None


def reads_nothing(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Whether a client without a certificate gets an alert instead of data."""
    with socket.create_connection((host, port)) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=NAME) as secure:
                return secure.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            return True


async def test_an_engine_with_another_name_is_not_trusted(models: RandomModels, authority: Authority) -> None:
    """A gateway refuses a server whose certificate is the authority's and has not the name of the engines."""
    server = EngineServer(models.engine().engine, "127.0.0.1:0", tls=authority.issue("engine", "gateway.internal"))
    await server.start()
    try:
        assert await error_of(f"127.0.0.1:{server.port}", authority.issue("gateway")) is not None
    finally:
        await server.stop()


async def test_renewed_files_are_read_without_a_restart(models: RandomModels, authority: Authority) -> None:
    """After its files were replaced, an engine shows the new certificate. Files that do not fit change nothing."""
    tls, renewed = authority.issue("engine"), authority.issue("renewed")
    own = authority.issue("gateway")
    server = EngineServer(models.engine().engine, "127.0.0.1:0", tls=tls)
    await server.start()
    address = ("127.0.0.1", server.port)
    try:
        first = await asyncio.to_thread(shown_name, address, own)
        tls.cert.write_bytes(renewed.cert.read_bytes())
        unfit = await asyncio.to_thread(shown_name, address, own)
        tls.key.write_bytes(renewed.key.read_bytes())
        last = await asyncio.to_thread(shown_name, address, own)
    finally:
        await server.stop()

    assert (first, unfit, last) == ("engine", "engine", "renewed")


def shown_name(address: tuple[str, int], own: EngineTls) -> str:
    """The common name of the certificate that a server shows."""
    context = ssl.create_default_context(cafile=own.ca)
    context.load_cert_chain(own.cert, own.key)
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(address) as plain, context.wrap_socket(plain, server_hostname=NAME) as secure:
        subject = dict(pair for group in (secure.getpeercert() or {})["subject"] for pair in group)  # type: ignore[misc]
    return str(subject["commonName"])


async def test_unix_sockets_stay_plain(models: RandomModels, authority: Authority, tmp_path: Path) -> None:
    """On a Unix socket, an engine with certificates serves a client without any."""
    address = f"unix:{tmp_path}/engine.sock"
    server = EngineServer(models.engine().engine, address, tls=authority.issue("engine"))
    await server.start()
    try:
        assert await error_of(address, None) is None
        assert await error_of(address, authority.issue("gateway")) is None
    finally:
        await server.stop()


def without_key(tls: EngineTls) -> EngineTls:
    return replace(tls, key=tls.key.with_name("missing.key"))


def with_another_key(tls: EngineTls) -> EngineTls:
    return replace(tls, key=tls.ca.with_name("ca.key"))


def with_an_empty_authority(tls: EngineTls) -> EngineTls:
    empty = tls.ca.with_name("empty.pem")
    empty.touch()
    return replace(tls, ca=empty)


@pytest.mark.parametrize(
    ("spoil", "param"),
    [
        (without_key, "engine_tls_key"),
        (with_another_key, "engine_tls_cert"),
        (with_an_empty_authority, "engine_tls_cert"),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_start(
    authority: Authority, spoil: Callable[[EngineTls], EngineTls], param: str
) -> None:
    """A missing file, a key of another certificate, and an authority without a certificate are refused by name."""
    with pytest.raises(InvalidRequest) as refused:
        serve_engine(EngineConfig(model=Path("/nowhere")), lambda _: None, "0.0.0.0:0", tls=spoil(authority.issue("e")))  # type: ignore[arg-type,return-value]

    assert refused.value.param == param
