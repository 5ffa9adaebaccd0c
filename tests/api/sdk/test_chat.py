"""Tests of chat completions through the SDK."""

import json

import pytest

from graftwork.api.sdk.transport.errors import APIConnectionError, ServerError
from tests.api.sdk.scripted_server import ScriptedServer, stream

HELLO = [{"role": "user", "content": "Hi"}]


def chunk(text: str) -> bytes:
    return f"data: {json.dumps({'id': 'c', 'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def test_a_stream_is_its_chunks() -> None:
    """A stream yields all chunks before [DONE]."""
    server = ScriptedServer(stream(chunk("Hel"), chunk("lo"), DONE))

    chunks = server.client().chat.completions.create(model="base", messages=HELLO, stream=True)

    assert "".join(each.text for each in chunks) == "Hello"
    assert server.body(0)["stream"] is True


def test_chunks_bring_their_logprobs() -> None:
    """A chunk keeps its logprobs."""
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": -1.5}]}}
    scored = f"data: {json.dumps({'id': 'c', 'choices': [choice]})}\n\n".encode()
    server = ScriptedServer(stream(scored, DONE))

    (only,) = server.client().chat.completions.create(model="base", messages=HELLO, stream=True, logprobs=True)

    logprobs = only.choices[0].logprobs
    assert logprobs is not None
    assert [(entry.token, entry.logprob) for entry in logprobs.content] == [("x", -1.5)]


def test_a_broken_stream_is_an_error() -> None:
    """A stream that ends without [DONE] raises an error."""
    server = ScriptedServer(stream(chunk("Hel")))

    with pytest.raises(APIConnectionError):
        list(server.client().chat.completions.create(model="base", messages=HELLO, stream=True))


def test_a_failure_within_the_stream_is_typed() -> None:
    """An `error` event raises its class after the chunks before it."""
    failure = b'event: error\ndata: {"error": {"message": "gone", "type": "internal_error"}}\n\n'
    server = ScriptedServer(stream(chunk("Hel"), failure))
    chunks = server.client().chat.completions.create(model="base", messages=HELLO, stream=True)

    assert next(chunks).text == "Hel"
    with pytest.raises(ServerError, match="gone"):
        next(chunks)


def test_extra_body_reaches_the_server() -> None:
    """Fields that the SDK does not name can still be sent."""
    server = ScriptedServer(stream(DONE))

    list(
        server.client().chat.completions.create(
            model="base", messages=HELLO, stream=True, seed=1, extra_body={"regex": "[0-9]+"}
        )
    )

    assert server.body(0) == {"model": "base", "messages": HELLO, "seed": 1, "regex": "[0-9]+", "stream": True}


async def test_async_chunks() -> None:
    """An asynchronous stream yields the same chunks."""
    server = ScriptedServer(stream(chunk("Hel"), chunk("lo"), DONE))

    async with server.async_client() as client:
        chunks = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
        text = "".join([each.text async for each in chunks])

    assert text == "Hello"
