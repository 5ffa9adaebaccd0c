"""Tests of how a server accepts connections, on both event loops."""

import asyncio
import errno
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from graftwork.api.http import acceptor as module
from graftwork.api.http.acceptor import Acceptor
from graftwork.api.server.uvicorn_server import bind
from graftwork.platform.clock import SystemClock


class Arrivals:
    """Makes connections that do nothing, and counts them. An acceptor calls it for each."""

    def __init__(self, expected: int) -> None:
        self.number = 0
        self.all_came = asyncio.Event()
        self._expected = expected

    def __call__(self) -> asyncio.Protocol:
        self.number += 1
        if self.number == self._expected:
            self.all_came.set()
        return asyncio.Protocol()


@contextmanager
def connected_clients(port: int, number: int) -> Iterator[list[socket.socket]]:
    """So many clients that have connected, whether the server has accepted them or not."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(number)]


async def test_all_connections_that_wait_are_accepted_in_a_few_turns() -> None:
    """A flood of connections keeps nobody out: the loop accepts many in each turn, whatever else it has to do in it."""
    arrivals = Arrivals(500)
    with bind("127.0.0.1", 0) as listening, connected_clients(listening.getsockname()[1], 500):
        acceptor = Acceptor(listening, arrivals, None)
        for _ in range(40):
            await asyncio.sleep(0)
        acceptor.close()
        await acceptor.wait_closed()

    assert arrivals.number == 500


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptor left, twice."""

    failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_a_process_without_descriptors_accepts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, rests, and then accepts who has waited."""
    monkeypatch.setattr(module, "REST_S", 0.01)
    arrivals = Arrivals(3)
    with bind("127.0.0.1", 0) as bound, Exhausted(fileno=bound.detach()) as listening:
        acceptor = Acceptor(listening, arrivals, None)
        with connected_clients(listening.getsockname()[1], 3):
            async with asyncio.timeout(30):
                await arrivals.all_came.wait()
        acceptor.close()

    assert [one.message for one in caplog.records].count(
        "No connection is accepted for 0.01 s: Too many open files."
    ) == 2


async def test_a_closed_acceptor_accepts_nobody() -> None:
    """Who has been accepted stays, and who comes later waits in vain."""
    arrivals = Arrivals(1)
    with bind("127.0.0.1", 0) as listening, connected_clients(listening.getsockname()[1], 1):
        acceptor = Acceptor(listening, arrivals, None)
        async with asyncio.timeout(30):
            await arrivals.all_came.wait()
        acceptor.close()
        with connected_clients(listening.getsockname()[1], 1):
            for _ in range(20):
                await asyncio.sleep(0)

    assert arrivals.number == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say that a client has left")
async def test_who_has_left_gets_no_protocol() -> None:
    """Of 200 clients that connect, send and leave at once, only those of the first turn of the loop begin."""
    arrivals = Arrivals(1)
    with bind("127.0.0.1", 0) as listening:
        with connected_clients(listening.getsockname()[1], 200) as clients:
            for one in clients:
                one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        acceptor = Acceptor(listening, arrivals, None)
        for _ in range(100):
            await asyncio.sleep(0)
        acceptor.close()
        await acceptor.wait_closed()

    assert 1 <= arrivals.number <= 16


async def test_long_turns_begin_few_connections() -> None:
    """If each connection takes 5 ms to begin, soon no turn of the loop begins more than a few of them."""
    clock, turn, begun = SystemClock(), 0, Counter[int]()

    def slow_connection() -> asyncio.Protocol:
        ends_at = clock.monotonic() + 0.005
        while clock.monotonic() < ends_at:
            pass
        begun[turn] += 1
        return asyncio.Protocol()

    with bind("127.0.0.1", 0) as listening, connected_clients(listening.getsockname()[1], 100):
        acceptor = Acceptor(listening, slow_connection, None)
        async with asyncio.timeout(60):
            while begun.total() < 100:
                await asyncio.sleep(0)
                turn += 1
        acceptor.close()

    assert max(list(begun.values())[4:]) <= 3
