"""Tests of writes that are sent together."""

import asyncio

import pytest

from graftwork.api.http.gathered_writes import GatheredWrites


class _Transport(asyncio.Transport):
    """Notes what is written and what else is done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bytes | str] = []
        self.has_left = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.done.append(bytes(data))

    def write_eof(self) -> None:
        self.done.append("eof")

    def close(self) -> None:
        self.done.append("close")

    def is_closing(self) -> bool:
        return self.has_left

    def get_write_buffer_size(self) -> int:
        return 7


@pytest.fixture
async def transport() -> _Transport:
    return _Transport()


@pytest.fixture
async def writes(transport: _Transport) -> GatheredWrites:
    return GatheredWrites(transport, asyncio.get_running_loop())


async def _let_others_run() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_head_and_what_follows_are_one_write(transport: _Transport, writes: GatheredWrites) -> None:
    """What is written in one turn of the loop, and by another task in the next, is sent by one write in its order."""
    writes.write(b"head ")
    asyncio.get_running_loop().call_soon(writes.write_on, b"event ")
    writes.write(b"body ")
    before = [*transport.done]
    await _let_others_run()

    assert before == []
    assert transport.done == [b"head body event "]


async def test_a_piece_that_comes_alone_is_not_held(transport: _Transport, writes: GatheredWrites) -> None:
    """A later event is written at once, and a second answer is held like the first."""
    writes.write(b"head")
    await _let_others_run()
    writes.write_on(b"event")
    at_once = [*transport.done]
    writes.write(b"second")
    await _let_others_run()

    assert at_once == [b"head", b"event"]
    assert transport.done == [b"head", b"event", b"second"]


@pytest.mark.parametrize(("end", "noted"), [("close", "close"), ("write_eof", "eof")])
async def test_the_end_comes_after_what_is_held(
    transport: _Transport, writes: GatheredWrites, end: str, noted: str
) -> None:
    """A connection that is closed has sent what was written before, and nothing is sent twice."""
    writes.write(b"answer")
    getattr(writes, end)()
    await _let_others_run()

    assert transport.done == [b"answer", noted]


async def test_much_is_not_held(transport: _Transport, writes: GatheredWrites) -> None:
    """What is longer than the bound is handed to the transport at once, which then says when to stop."""
    for _ in range(4):
        writes.write(b"a" * 40_000)
    at_once = [len(data) for data in transport.done]
    await _let_others_run()

    assert at_once == [80_000, 80_000]
    assert transport.done == [b"a" * 80_000] * 2


async def test_nothing_is_written_to_a_client_that_has_left(transport: _Transport, writes: GatheredWrites) -> None:
    """What was held is dropped with the connection; all else is asked of the transport."""
    writes.write(b"answer")
    transport.has_left = True
    await _let_others_run()

    assert transport.done == []
    assert writes.get_write_buffer_size() == 7
