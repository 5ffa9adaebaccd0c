"""Tests of retries: when a failed request is sent again, and after which wait."""

from random import Random

import httpx
import pytest

from graftwork.api.sdk.transport.errors import (
    APIConnectionError,
    APITimeoutError,
    ConflictError,
    RateLimitError,
    ServerError,
)
from graftwork.api.sdk.transport.retries import LONGEST_BACKOFF_S, RetryPolicy
from tests.api.sdk.scripted_server import ScriptedServer, error, session

EMPTY_LIST = {"object": "list", "data": [], "has_more": False}


def ok() -> httpx.Response:
    return httpx.Response(200, json=EMPTY_LIST)


def test_retry_after_ms_wins_over_retry_after() -> None:
    """`retry-after-ms` is obeyed to the millisecond."""
    server = ScriptedServer(error(429, {"retry-after": "2", "retry-after-ms": "1250"}), ok())

    server.client().models.list()

    assert server.waits == [1.25]


def test_retry_after_is_obeyed() -> None:
    """Without `retry-after-ms`, `retry-after` is obeyed."""
    server = ScriptedServer(error(503, {"retry-after": "7"}), ok())

    server.client().models.list()

    assert server.waits == [7.0]


def test_without_a_header_waits_grow() -> None:
    """The backoff doubles from half a second, minus at most a quarter."""
    server = ScriptedServer(error(503), error(503), ok())

    server.client().models.list()

    first, second = server.waits
    assert 0.375 <= first <= 0.5
    assert 0.75 <= second <= 1.0


def test_backoff_has_a_ceiling() -> None:
    """The backoff has an upper limit."""
    policy = RetryPolicy(max_retries=100, random=Random(0))

    assert max(policy.backoff(attempt) for attempt in range(60)) <= LONGEST_BACKOFF_S


@pytest.mark.parametrize("status", [429, 503])
def test_a_spent_budget_is_not_retried(status: int) -> None:
    """`x-should-retry: false` prevents a retry, whatever the status."""
    server = ScriptedServer(error(status, {"x-should-retry": "false", "retry-after": "1"}))

    with pytest.raises((RateLimitError, ServerError)):
        server.client().models.list()

    assert server.waits == []


def test_the_server_may_ask_for_a_retry() -> None:
    """`x-should-retry: true` allows a retry of any status."""
    server = ScriptedServer(error(409, {"x-should-retry": "true", "retry-after-ms": "10"}), ok())

    server.client().models.list()

    assert server.waits == [0.01]


def test_conflicts_are_not_retried() -> None:
    """A conflict is not retried."""
    server = ScriptedServer(error(409))

    with pytest.raises(ConflictError):
        server.client().models.list()

    assert len(server.requests) == 1


def test_a_request_still_under_way_is_asked_for_again() -> None:
    """A conflict with `retry-after` is retried, because the first try still runs."""
    server = ScriptedServer(error(409, {"retry-after": "1", "retry-after-ms": "1000"}), ok())

    server.client().models.list()

    assert server.waits == [1.0]


def test_waits_of_minutes_are_left_to_the_caller() -> None:
    """If the server asks for more than a minute, the client raises at once."""
    server = ScriptedServer(error(429, {"retry-after": "3600"}))

    with pytest.raises(RateLimitError):
        server.client().models.list()

    assert server.waits == []


def test_a_dropped_connection_is_tried_again() -> None:
    """Network failures are retried up to `max_retries` times."""
    dropped = httpx.RemoteProtocolError("gone")
    server = ScriptedServer(dropped, httpx.ConnectError("refused"), dropped)

    with pytest.raises(APIConnectionError):
        server.client(max_retries=2).models.list()

    assert len(server.requests) == 3


def test_a_timeout_is_not_tried_again() -> None:
    """A timeout is not retried."""
    server = ScriptedServer(httpx.ReadTimeout("slow"))

    with pytest.raises(APITimeoutError):
        server.client().models.list()


def test_creating_twice_makes_one() -> None:
    """All tries of a creating POST have the same Idempotency-Key, and the next creation has another."""
    server = ScriptedServer(httpx.ReadError("gone"), session(), session())
    client = server.client()

    client.sessions.create(model="base")
    client.sessions.create(model="base")

    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert keys[0] == keys[1] != keys[2]


async def test_the_async_client_waits_alike() -> None:
    """Both clients perform the same steps."""
    server = ScriptedServer(error(429, {"retry-after-ms": "1250"}), ok())

    async with server.async_client() as client:
        await client.models.list()

    assert server.waits == [1.25]
