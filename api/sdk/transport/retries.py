"""Decides when to send a request again, and how long to wait before that.

The server's `retry-after` sets the wait. Without that header, the wait doubles with each try.
Never sleeps: this module yields a `Sleep` effect instead.
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
"""The longest wait in seconds. If the server asks for a longer wait, the SDK raises the error at once."""
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to send a request again, and the random part of each wait. With `max_retries` 0, there is one try."""

    max_retries: int = 2
    random: Random = field(default_factory=Random, repr=False)

    def backoff(self, attempt: int) -> float:
        """Returns the seconds to wait after try number `attempt`, counted from 0.

        The wait doubles with each try up to LONGEST_BACKOFF_S. Then a random part of at most a quarter is subtracted.
        """
        wait = min(FIRST_WAIT_S * 2.0**attempt, LONGEST_BACKOFF_S)
        return wait * (1 - self.random.random() / 4)

    def wait_after(self, response: httpx.Response, attempt: int) -> float | None:
        """Returns the seconds to wait after an answer with an error. Returns None if there must be no next try.

        `attempt` is the number of the try, from 0.
        """
        if attempt >= self.max_retries or not _may_retry(response):
            return None
        asked = asked_wait(response.headers)
        if asked is None:
            return self.backoff(attempt)
        return asked if asked <= LONGEST_WAIT_S else None

    def wait_after_drop(self, error: APIConnectionError, call: Call, attempt: int) -> float | None:
        """Returns the seconds to wait after a try that got no answer. `attempt` is the number of the try, from 0.

        Returns None if there must be no next try, for example after a timeout.
        """
        if attempt >= self.max_retries or isinstance(error, APITimeoutError):
            return None
        return self.backoff(attempt)


def _may_retry(response: httpx.Response) -> bool:
    """Returns whether another try can help.

    A 409 with `retry-after` means that the server still works on an earlier try of this request.
    """
    told = response.headers.get("x-should-retry")
    if told in ("true", "false"):
        return bool(told == "true")
    is_under_way = response.status_code == 409 and asked_wait(response.headers) is not None
    return is_under_way or response.status_code in RETRIED_STATUSES


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Returns how many seconds the server asks the client to wait. Reads `retry-after-ms`, or else `retry-after`.

    Returns None if both headers are missing or have no number.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(float(headers[name]) * unit, 0.0)
        except (KeyError, ValueError):
            continue  # the header is missing, or it holds a date: the caller uses the backoff
    return None


def send(call: Call, policy: RetryPolicy) -> Steps[httpx.Response]:
    """Sends an HTTP request, and sends it again as the policy allows.

    Returns the response, or raises the error of the last try.
    """
    call = with_key(call)
    return (yield from _try_until_answered(Send(call), call, policy))


def open_stream(call: Call, connection: Connection, policy: RetryPolicy) -> Steps[httpx.Response]:
    """Sends an HTTP request with retries, as `send` does, but opens the answer as a stream.

    Stores the open answer in `connection`, and also returns it.
    """
    call = with_key(call)
    return (yield from _try_until_answered(OpenStream(call, connection), call, policy))


def with_key(call: Call) -> Call:
    """Returns the call with an `Idempotency-Key` if the call creates something. Returns any other call unchanged."""
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
