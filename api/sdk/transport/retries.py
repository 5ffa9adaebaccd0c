"""When to send a request again, and how long to wait: the server's word first, exponential backoff without one.

Holds no clock and never sleeps: waiting is an effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from uuid import uuid4

import httpx

from graftwork.api.sdk.transport.effects import Call, Connection, Effect, OpenStream, Send, Sleep, Steps
from graftwork.api.sdk.transport.errors import APIConnectionError, APITimeoutError, error_from_response

FIRST_WAIT_S = 0.5
LONGEST_BACKOFF_S = 8.0
LONGEST_WAIT_S = 60.0
"""A server that asks for more is answered with the error: the caller should decide about minutes."""
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and with what jitter. `max_retries` 0 tries once."""

    max_retries: int = 2
    random: Random = field(default_factory=Random, repr=False)

    def backoff(self, attempt: int) -> float:
        """Seconds before try number `attempt` + 2: doubling, less up to a quarter so that clients spread out."""
        wait = min(FIRST_WAIT_S * 2.0**attempt, LONGEST_BACKOFF_S)
        return wait * (1 - self.random.random() / 4)

    def wait_after(self, response: httpx.Response, attempt: int) -> float | None:
        """Seconds to wait before sending again, or None if that is pointless."""
        if attempt >= self.max_retries or not _may_retry(response):
            return None
        asked = asked_wait(response.headers)
        if asked is None:
            return self.backoff(attempt)
        return asked if asked <= LONGEST_WAIT_S else None

    def wait_after_drop(self, error: APIConnectionError, call: Call, attempt: int) -> float | None:
        """As `wait_after`, where no answer came. What ran into the timeout once would do so again."""
        if attempt >= self.max_retries or isinstance(error, APITimeoutError):
            return None
        return self.backoff(attempt)


def _may_retry(response: httpx.Response) -> bool:
    """A conflict that says how long to wait is this very request, whose first try is still under way."""
    told = response.headers.get("x-should-retry")
    if told in ("true", "false"):
        return bool(told == "true")
    is_under_way = response.status_code == 409 and asked_wait(response.headers) is not None
    return is_under_way or response.status_code in RETRIED_STATUSES


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds from `retry-after-ms`, else from `retry-after`."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(float(headers[name]) * unit, 0.0)
        except (KeyError, ValueError):
            continue  # absent, or a date: the backoff will do
    return None


def send(call: Call, policy: RetryPolicy) -> Steps[httpx.Response]:
    """The success that a call ends with. Raises the typed error it ends with otherwise."""
    call = with_key(call)
    return (yield from _try_until_answered(Send(call), call, policy))


def open_stream(call: Call, connection: Connection, policy: RetryPolicy) -> Steps[httpx.Response]:
    """As `send`, for an answer that is read piece by piece through `connection`."""
    call = with_key(call)
    return (yield from _try_until_answered(OpenStream(call, connection), call, policy))


def with_key(call: Call) -> Call:
    """The call under an Idempotency-Key, where it creates something and has none yet."""
    if not call.creates or "idempotency-key" in call.headers:
        return call
    return call.with_headers(idempotency_key=uuid4().hex)


def _try_until_answered(effect: Effect, call: Call, policy: RetryPolicy) -> Steps[httpx.Response]:
    attempt = 0
    while True:
        try:
            response: httpx.Response = yield effect
        except APIConnectionError as error:
            wait = policy.wait_after_drop(error, call, attempt)
            if wait is None:
                raise
        else:
            if response.is_success:
                return response
            wait = policy.wait_after(response, attempt)
            if wait is None:
                raise error_from_response(response)
        yield Sleep(wait)
        attempt += 1
