"""Tests of what tracing does at each token of a stream: counted in calls, which no other work changes."""

import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from graftwork.engine.core.events import EngineEvent, StepsTraced, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.step_spans import EngineSpan, SpanName
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks

SHORT, LONG = 40, 200
_EVERY = 40
TRACING = ("/platform/tracing/request_trace.py", "/sessions/generation/tracer.py")
"""The files whose functions trace a request, beside the writes of `timed_write`."""


class ReportingEngine(FakeEngine):
    """Reports the steps of traced requests about as often as an engine does whose step takes 25 ms."""

    async def _events(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        made = reported = 0
        async for event in super()._events(request):
            yield event
            made += isinstance(event, TokensGenerated)
            if request.traced and made - reported >= max(_EVERY, made // 4):
                steps, reported = made - reported, made
                yield StepsTraced(1, 1.0, (EngineSpan(SpanName.DECODE, 0.5, 0.4, steps, 0.3, steps, 8.0, 8.0),))


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of the functions that trace a request, in this thread."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename.endswith(TRACING) or "timed_write" in code.co_qualname):
            calls[code.co_qualname] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def calls_of_a_token(tenant: TestTenant, header: dict[str, str]) -> tuple[float, Counter[str]]:
    """The calls for each token between two lengths of a streamed chat, so that nothing else of the request counts; and
    those of the long chat by function.
    """
    found = []
    for tokens in (SHORT, LONG):
        body = chat(stream=True, max_tokens=tokens)
        with counted_calls() as calls:
            answer = await tenant.client.post("/v1/chat/completions", json=body, headers=header)
        assert len([one for one in chunks(answer.text) if one["choices"][0]["delta"].get("content")]) >= tokens - 1
        found.append(calls)
    return (found[1].total() - found[0].total()) / (LONG - SHORT), found[1]


@pytest.fixture
def talker(gateway: Gateway) -> FakeEngine:
    """The gateway's engine, which answers with as many tokens as are asked for."""
    engine = gateway.engine
    engine.__class__ = ReportingEngine
    engine.text = "sun " * (LONG + 1)
    return engine


async def test_an_untraced_token_pays_nothing(tenant: TestTenant, talker: FakeEngine) -> None:
    """No function of tracing is called for a token of a request that is not traced, though each is for the request."""
    of_a_token, calls = await calls_of_a_token(tenant, {})

    assert of_a_token == 0
    assert {"RequestTrace.mark", "GenerationTracer.first_token"} <= set(calls)


async def test_a_traced_token_pays_a_third_of_a_call(tenant: TestTenant, talker: FakeEngine) -> None:
    """A token of a traced request calls nothing of tracing between two reports of its steps. The reports, with the token
    after each that is measured, are less than a third of a call for each token.
    """
    of_a_token, calls = await calls_of_a_token(tenant, {"x-graftwork-trace": "1"})

    assert talker.requests[-1].traced
    assert calls["GenerationTrace.add_spans"] == 4
    assert calls["GenerationTracer._measured"] > 4
    assert 0 < of_a_token < 1 / 3
