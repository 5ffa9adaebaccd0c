"""Server-sent events as bytes, and the response that carries them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from graftwork.api.http.streaming import EventStream, TextEvents, Write, data_event


def event_of(text: str) -> bytes:
    return data_event({"model": "é", "choices": [{"delta": {"content": text}, "index": 0}]})


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_event_has_the_bytes_of_the_whole_event(text: str) -> None:
    """Encoding the rest once changes no byte, whatever the text."""
    assert TextEvents(event_of).of(text) == event_of(text)


def test_a_text_must_stand_in_its_event_once() -> None:
    """An event that has its text twice, or not at all, is refused when it is made ready."""
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
    """`on_end` is called, and the body is left open, so that the client sees that something is missing."""
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
