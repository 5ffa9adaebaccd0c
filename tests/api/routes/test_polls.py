"""Polls of the overview over a real connection: the same poll again is answered without being read, by the same rules."""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from graftwork.api.overview import board as module
from graftwork.api.server.http_connection import HttpConnection
from graftwork.platform.keys.scopes import Scope
from tests.api.gateway_on_port import gateway_on_port, running_server
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, TestTenant, chat

_OPERATORS = "/v1/admin/overview"
_TENANTS = "/v1/overview"

Answer = tuple[int, Mapping[str, str], bytes]


class _Poller:
    """One connection, and how many of its requests the application has read."""

    def __init__(self, gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gateway = gateway
        self._reader = reader
        self._writer = writer

    async def ask(self, path: str, key: str, *more: str) -> Answer:
        """Sends a poll, and returns status, headers and body."""
        await self._gateway.resources.account.tenancy.changes.poll()  # as the gateway's own task does
        lines = [f"GET {path} HTTP/1.1", "Host: test", f"Authorization: Bearer {key}", *more, "", ""]
        self._writer.write("\r\n".join(lines).encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *headers = head.strip().split("\r\n")
        by_name = {name.lower(): value for name, _, value in (line.partition(": ") for line in headers)}
        body = await self._reader.readexactly(int(by_name.get("content-length", 0)))
        return int(first.split()[1]), by_name, body


@pytest.fixture
def read(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that the application was given."""
    paths, begin = list[str](), gateway.resources.server.traces.begin

    def counted(request_id: str, scope: Mapping[str, str]) -> object:
        paths.append(scope["path"])
        return begin(request_id, scope)

    monkeypatch.setattr(gateway.resources.server.traces, "begin", counted)
    return paths


@asynccontextmanager
async def _connection(gateway: Gateway, url: str) -> AsyncIterator[_Poller]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield _Poller(gateway, reader, writer)
    writer.close()


@pytest.fixture
async def poller(gateway: Gateway) -> AsyncIterator[_Poller]:
    async with gateway_on_port(gateway) as url, _connection(gateway, url) as poller:
        yield poller


async def test_the_same_poll_is_not_read_again(
    gateway: Gateway, tenant: TestTenant, poller: _Poller, read: list[str]
) -> None:
    """The second poll of a second has the body and the headers of the first, and ids of its own; the operator's and a
    tenant's.
    """
    for path, key in ((_OPERATORS, ADMIN_KEY), (_TENANTS, tenant.key)):
        read.clear()
        first, second, third = [await poller.ask(path, key) for _ in range(3)]

        assert read == [path]
        assert (second[0], second[2]) == (first[0], first[2]) == (third[0], third[2])
        assert {*second[1]} == {*first[1]}
        assert {name for name in first[1] if first[1][name] != second[1][name]} <= {
            "x-request-id",
            "x-graftwork-trace-id",
            "date",
        }
        assert len({one[1]["x-request-id"] for one in (first, second, third)}) == 3
        assert second[1]["x-request-id"].startswith("req_")


async def test_a_repeated_poll_knows_what_its_watcher_has(
    gateway: Gateway, tenant: TestTenant, poller: _Poller, read: list[str]
) -> None:
    """With the ETag of the latest answer it is a 304; with another one it has a body; compressed as the client asks."""
    zipped = "Accept-Encoding: gzip"
    whole = await poller.ask(_OPERATORS, ADMIN_KEY, zipped)
    unchanged = await poller.ask(_OPERATORS, ADMIN_KEY, zipped, f"If-None-Match: {whole[1]['etag']}")
    other = await poller.ask(_OPERATORS, ADMIN_KEY, zipped, 'If-None-Match: "other"')

    assert read == [_OPERATORS]
    assert (whole[0], unchanged[0], other[0]) == (200, 304, 200)
    assert unchanged[2] == b""
    assert other[2] == whole[2]
    assert json.loads(gzip.decompress(whole[2]))["object"] == "overview"


async def test_a_late_poll_has_a_new_snapshot(gateway: Gateway, tenant: TestTenant, poller: _Poller) -> None:
    """A repeated poll never shows what is older than a snapshot may be."""
    for _ in range(2):
        before = json.loads((await poller.ask(_TENANTS, tenant.key))[2])
    await tenant.client.post("/v1/chat/completions", json=chat())
    gateway.clock.advance(module.FRESH_S)
    after = json.loads((await poller.ask(_TENANTS, tenant.key))[2])

    assert after["sequence"] > before["sequence"]
    assert after["at"] > before["at"]


async def test_a_key_that_lost_its_right_is_refused_at_once(
    gateway: Gateway, tenant: TestTenant, poller: _Poller
) -> None:
    """A revoked key, a suspended tenant and a wrong key get no repeated answer, nor does another key get this one's."""
    made = await gateway.resources.account.tenancy.create_key(tenant.id, "second", scopes=frozenset({Scope.USAGE}))
    for key in (made[1], made[1], tenant.key, tenant.key):
        assert (await poller.ask(_TENANTS, key))[0] == 200
    assert (await poller.ask(_TENANTS, made[1]))[0] == 200

    await gateway.resources.account.tenancy.revoke_key(tenant.id, made[0].id)
    revoked = await poller.ask(_TENANTS, made[1])
    await poller.ask(_TENANTS, tenant.key)
    await gateway.admin.post(f"/v1/admin/tenants/{tenant.id}/suspend")
    suspended = await poller.ask(_TENANTS, tenant.key)
    wrong = await poller.ask(_OPERATORS, ADMIN_KEY + "x")

    assert [revoked[0], suspended[0], wrong[0]] == [401, 403, 401]


async def test_repeated_polls_of_different_senders(gateway: Gateway, tenant: TestTenant, poller: _Poller) -> None:
    """On one connection, as behind a proxy, each poll shows what its own key may see."""
    other = await gateway.tenant("Globex")

    for _ in range(3):
        for one in (tenant, other):
            seen = json.loads((await poller.ask(_TENANTS, one.key))[2])
            assert [row["id"] for row in seen["tenants"]] == [one.id]
        assert (await poller.ask(_OPERATORS, tenant.key))[0] == 403


async def test_polls_that_someone_wants_to_see(
    gateway: Gateway, tenant: TestTenant, poller: _Poller, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """While the operator traces the tenant, and while polls have lines in the log, every poll is read."""
    for _ in range(2):
        await poller.ask(_TENANTS, tenant.key)
    gateway.resources.server.traces.rules.switches.traced = frozenset({tenant.id})
    for _ in range(2):
        await poller.ask(_TENANTS, tenant.key)
    gateway.resources.server.traces.rules.switches.traced = frozenset()
    caplog.set_level(logging.DEBUG, logger="graftwork.api.http.middleware")
    for _ in range(2):
        await poller.ask(_OPERATORS, ADMIN_KEY)

    assert read == [_TENANTS] * 3 + [_OPERATORS] * 2


async def test_a_poller_keeps_its_connection(gateway: Gateway) -> None:
    """The time for idle connections counts from the latest repeated poll."""
    async with running_server(gateway) as (server, url), _connection(gateway, url) as poller:
        for _ in range(3):
            await poller.ask(_OPERATORS, ADMIN_KEY)
        (connection,) = server.server_state.connections
        assert isinstance(connection, HttpConnection)
        timer = connection.timeout_keep_alive_task
        assert timer is not None
        timer.cancel()

        connection.timeout_keep_alive_handler()  # the timer of the first poll
        kept = connection.transport.is_closing()
        connection.timeout_keep_alive = 0
        connection.timeout_keep_alive_handler()

    assert (kept, connection.transport.is_closing()) == (False, True)
