"""Tests of the messages between the engine and the process that compiles grammars."""

import json
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.compile.compile_jobs import CompileAnswer, CompileJob, receive, send
from graftwork.engine.grammar.schema.lint import GrammarEngine


def received(content: bytes) -> CompileJob | CompileAnswer | None:
    ours, theirs = os.pipe()
    try:
        os.write(theirs, content)
        os.close(theirs)
        return receive(ours)
    finally:
        os.close(ours)


def sent(message: CompileJob | CompileAnswer) -> bytes:
    ours, theirs = os.pipe()
    try:
        send(theirs, message)
        os.close(theirs)
        return os.read(ours, 1 << 16)
    finally:
        os.close(ours)


@given(kind=st.sampled_from(GrammarKind), text=st.text(max_size=50), strict=st.booleans(), number=st.integers(0, 2**60))
def test_a_job_arrives_as_it_was_sent(kind: GrammarKind, text: str, strict: bool, number: int) -> None:
    """A job is the same after the pipe, with any text."""
    job = CompileJob(number, GrammarSource(kind, text, strict), 1.5, 4.0, 2**30)

    assert received(sent(job)) == job


@given(payload=st.binary(max_size=200), compact=st.binary(max_size=200), refusal=st.text(max_size=50))
def test_an_answer_arrives_as_it_was_sent(payload: bytes, compact: bytes, refusal: str) -> None:
    """An answer is the same after the pipe, with any bytes of a compiled grammar."""
    for engine in (None, *GrammarEngine):
        answer = CompileAnswer(7, 0.25, engine, payload, compact, refusal, "#/a", "some_code")

        assert received(sent(answer)) == answer


def test_a_stream_that_has_ended_has_no_message() -> None:
    """At the end of the stream there is no message."""
    assert received(b"") is None


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\n(S'touch /tmp/owned'\ntR.",
        b"{",
        b"[]",
        b"1",
        b'{"job": {}}',
        b'{"job": {"source": {"kind": "other", "text": ""}}}',
        b'{"answer": {"engine": null, "unknown": 1}}',
        json.dumps({"answer": {"engine": "python"}}).encode(),
    ],
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    """Content that is not a message, such as a pickle, is an error and runs nothing."""
    with pytest.raises(ValueError, match=r".+"):
        received(struct.pack("<III", len(text), 0, 0) + text)
