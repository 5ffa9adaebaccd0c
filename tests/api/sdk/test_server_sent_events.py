"""Tests of server-sent events, whose bytes may be cut anywhere."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.api.sdk.transport.sse import Frame, FrameParser


def frames_of(*chunks: bytes) -> list[Frame]:
    parser = FrameParser()
    return [frame for chunk in chunks for frame in parser.feed(chunk)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_all_line_ends_are_read(end: bytes) -> None:
    """LF, CRLF and CR end a line."""
    text = end.join([b"id: 3", b"event: ping", b"data: a", b"data: b", b"", b""]) + b"\n"

    assert frames_of(text) == [Frame("ping", "a\nb", "3")]


def test_comments_and_empty_events_are_passed_over() -> None:
    """Comments and events without data are ignored."""
    assert frames_of(b": hello\n\nevent: x\n\ndata: 1\n\n") == [Frame("message", "1")]


def test_an_unfinished_event_is_held_back() -> None:
    """An event without a final blank line is not yielded."""
    assert frames_of(b"data: 1\n") == []


SENT = "id: 1\r\nevent: a\r\ndata: Grüße\r\n\r\n: ping\n\ndata: {}\ndata: 漢字\n\nid: 2\rdata:x\r\r\n".encode()


@given(st.lists(st.integers(0, len(SENT)), max_size=20))
def test_cutting_changes_nothing(cuts: list[int]) -> None:
    """Events are the same for any cut of the bytes, also within a character or a line end."""
    bounds = [0, *sorted(cuts), len(SENT)]
    pieces = [SENT[start:end] for start, end in itertools.pairwise(bounds)]

    assert frames_of(*pieces) == [Frame("a", "Grüße", "1"), Frame("message", "{}\n漢字"), Frame("message", "x", "2")]
