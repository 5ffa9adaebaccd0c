"""Tests of event streams: server-sent events as bytes, their response, and heartbeats."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from graftwork.api.http.streaming import EventStream, TextEvents, Write, data_event, heartbeats, timed_write
from graftwork.platform.clock import ManualClock
from graftwork.platform.tracing.request_trace import CallTimer, RequestTrace
from graftwork.platform.tracing.trace_ids import TraceIds


def event_of(text: str) -> bytes:
    return data_event({"model": "é", "choices": [{"delta": {"content": text}, "index": 0}]})


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_event_has_the_bytes_of_the_whole_event(text: str) -> None:
    """An event whose fixed part is encoded once has the same bytes for every text."""
    assert TextEvents(event_of).of(text) == event_of(text)


def test_a_text_must_stand_in_its_event_once() -> None:
    """An event that contains its text twice or not at all is refused when it is prepared."""
    with pytest.raises(ValueError, match="unpack"):
        TextEvents(lambda text: data_event({"one": text, "other": text}))
    with pytest.raises(ValueError, match="unpack"):
        TextEvents(lambda text: data_event({}))


async def test_a_stream_sends_what_its_source_writes() -> None:
    """Each event is one body message, and the last message ends the body and the stream."""
    sent: list[Message] = []
    ended: list[bool] = []

    async def source(write: Write) -> None:
        await write(b"data: 1\n\n")
        await write(b"data: 2\n\n")

    async def send(message: Message) -> None:
        sent.append(message)

    await EventStream(source, on_end=lambda: ended.append(True)).stream_response(send)

    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b"data: 2\n\n", b""]
    assert [message.get("more_body") for message in sent] == [None, True, True, False]
    assert ended == [True]


async def test_a_source_that_fails_ends_the_stream_all_the_same() -> None:
    """If the source fails, `on_end` is called and the body is left open, so that the client sees a broken stream."""
    sent: list[Message] = []
    ended: list[bool] = []

    async def source(write: Write) -> None:
        await write(json.dumps("begun").encode())
        raise ZeroDivisionError

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(ZeroDivisionError):
        await EventStream(source, on_end=lambda: ended.append(True)).stream_response(send)

    assert sent[-1]["more_body"] is True
    assert ended == [True]


PING = b"ping"


class RecordingClient:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._arrived = asyncio.Event()

    async def write(self, event: bytes) -> None:
        self.received.append(event)
        self._arrived.set()

    async def receive(self) -> bytes:
        """The next event to come."""
        self._arrived.clear()
        await self._arrived.wait()
        return self.received[-1]


async def test_silence_is_filled_with_pings() -> None:
    """Pings are written while no event is, and the events keep their order."""
    client = RecordingClient()

    async with heartbeats(client.write, PING, silence_s=0.0) as write:
        for event in (b"1", b"2", b"3"):
            assert await client.receive() == PING
            await write(event)

    assert [event for event in client.received if event != PING] == [b"1", b"2", b"3"]


async def test_an_event_puts_the_next_ping_off() -> None:
    """A stream whose events come often enough gets no ping."""
    client = RecordingClient()

    async with heartbeats(client.write, PING, silence_s=3600.0) as write:
        await write(b"1")
        await asyncio.sleep(0)
        await write(b"2")

    assert client.received == [b"1", b"2"]


async def test_no_ping_after_the_end() -> None:
    """No ping is written after the block has ended."""
    client = RecordingClient()

    async with heartbeats(client.write, PING, silence_s=0.0):
        await client.receive()
    seen = len(client.received)
    for _ in range(10):
        await asyncio.sleep(0)

    assert len(client.received) == seen


async def test_a_timer_estimates_by_every_sixteenth_call() -> None:
    """Of 33 writes the first, the seventeenth and the last are measured, and their mean stands for all."""
    clock, written = ManualClock(), list[bytes]()
    trace = RequestTrace(TraceIds("req_1", "0" * 32), "POST", "/v1/chat/completions", clock)
    trace.is_traced = True

    async def write(event: bytes) -> None:
        written.append(event)
        clock.advance({1: 1.0, 17: 2.0, 33: 3.0}.get(len(written), 100.0))

    timed = timed_write(trace, write)
    for number in range(33):
        await timed(b"%d" % number)

    assert written == [b"%d" % number for number in range(33)]
    assert trace.writes.calls == 33
    assert trace.writes.seconds == 2.0 * 33
    assert CallTimer().seconds == 0
