"""Performs effects, which are objects that describe the SDK's input and output.

Owns the network connections. Of the SDK's modules, only this one and `tools.py` use the network, a clock or threads.
`SyncRuntime` and `AsyncRuntime` differ only in `await`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from graftwork.api.sdk.transport.effects import (
    Call,
    CloseStream,
    Connection,
    Effect,
    Emit,
    Opened,
    OpenStream,
    ReadStream,
    RunTools,
    Send,
    Sleep,
    Steps,
)
from graftwork.api.sdk.transport.errors import APIConnectionError, APITimeoutError, ConfigurationError
from graftwork.api.sdk.transport.retries import RetryPolicy
from graftwork.api.sdk.transport.tools import run_tools

T = TypeVar("T")


FindToken = Callable[[bool], str | None]
"""A function that returns the token of a person who has signed in: an operator's for True, a tenant's for False, or None.

It may read a file, and ask the server and the identity provider for a new token.
"""


@dataclass(frozen=True, slots=True)
class Keys:
    """The tenant's key and the admin key, or None for a key that the caller did not give.

    `header` raises ConfigurationError if the key that a call needs is None and nobody has signed in.
    """

    tenant: str | None
    admin: str | None
    find_token: FindToken | None = None
    """Where the token of a person is found, for a key that is None."""

    @property
    def has_admin(self) -> bool:
        """Whether calls of an operator have a key, or there is no key at all and the person is an operator."""
        if self.admin is not None or self.tenant is not None or self.find_token is None:
            return self.admin is not None
        try:
            return self.find_token(True) is not None
        except ConfigurationError:
            return False

    def must_find(self, call: Call) -> bool:
        """Returns whether `header` may have to wait for a file or a server."""
        return (self.admin if call.admin else self.tenant) is None and self.find_token is not None

    def header(self, call: Call) -> dict[str, str]:
        key = self.admin if call.admin else self.tenant
        if key is None and self.find_token is not None:
            key = self.find_token(call.admin)
        if key is None:
            argument, variable = ("admin_key", "ADMIN_KEY") if call.admin else ("api_key", "API_KEY")
            message = f"This call needs a key: pass {argument}=…, set GRAFTWORK_{variable}, or run `graftwork login`."
            raise ConfigurationError(message)
        return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """Says that the generator of an SDK method has ended. `value` is the method's result."""

    value: T


def build_request(http: httpx.Client | httpx.AsyncClient, call: Call, keys: Keys) -> httpx.Request:
    """Builds the httpx request of a call, with the API key. Each try needs a new request."""
    query = {name: value for name, value in call.query.items() if value is not None}
    headers = {**keys.header(call), **call.headers}
    body: dict[str, Any] = {"json": call.json, "data": call.form, "files": call.files, "content": call.content}
    return http.build_request(call.method, call.path, params=query, headers=headers, **body)


async def build_request_async(http: httpx.AsyncClient, call: Call, keys: Keys) -> httpx.Request:
    """Builds the request as `build_request`, without blocking the event loop."""
    if keys.must_find(call):
        return await asyncio.to_thread(build_request, http, call, keys)
    return build_request(http, call, keys)


def connection_error(error: httpx.TransportError, base_url: httpx.URL) -> APIConnectionError:
    """Converts an httpx error to an error of the SDK, whose message names the server's address."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return APIConnectionError(f"No Graftwork server answers at {base_url}", code="unreachable")
    if isinstance(error, httpx.TimeoutException):
        return APITimeoutError(f"{base_url} took too long to answer", code="timeout")
    return APIConnectionError(f"The connection to {base_url} broke: {error}", code="dropped")


class SyncRuntime:
    """Performs effects one after another on the caller's thread. Only the user's tools run on other threads.

    An effect describes one input or output, such as sending a request. Each method of the SDK is a generator of effects
    (see effects.py).
    """

    def __init__(self, http: httpx.Client, keys: Keys, policy: RetryPolicy, sleep: Callable[[float], None]) -> None:
        self.http = http
        self.policy = policy
        self.keys = keys
        self._sleep = sleep

    def run(self, steps: Steps[T]) -> T:
        """Performs all effects of the generator `steps`, and returns its result. `steps` must not emit events."""
        ended = self.advance(steps)
        assert isinstance(ended, Ended)
        return ended.value

    def advance(self, steps: Steps[T]) -> Ended[T] | Emit[Any] | Opened:
        """Performs the effects of the generator `steps` until `steps` emits an event, has opened its stream, or ends.

        Returns the effect Emit or Opened, or Ended with the result of `steps`.
        """
        answer: Any = None
        failure: APIConnectionError | None = None
        try:
            while True:
                effect = steps.send(answer) if failure is None else steps.throw(failure)
                if isinstance(effect, Emit | Opened):
                    return effect
                try:
                    answer, failure = self._perform(effect), None
                except httpx.TransportError as error:
                    answer, failure = None, connection_error(error, self.http.base_url)
        except StopIteration as ended:
            return Ended(ended.value)

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Send(call):
                return self.http.send(build_request(self.http, call, self.keys))
            case OpenStream(call, connection):
                return self._open(call, connection)
            case ReadStream(connection):
                return next(connection.chunks, None)
            case CloseStream(connection):
                return self.close_connection(connection)
            case Sleep(seconds):
                return self._sleep(seconds)
            case RunTools(calls, tools, timeout):
                # This uses a new thread, because the caller's thread may already run an event loop, as in a notebook.
                with ThreadPoolExecutor(max_workers=1) as executor:
                    return executor.submit(asyncio.run, run_tools(calls, tools, timeout)).result()
        raise AssertionError(f"unknown effect {effect!r}")

    def _open(self, call: Call, connection: Connection) -> httpx.Response:
        self.close_connection(connection)
        response = self.http.send(build_request(self.http, call, self.keys), stream=True)
        connection.response = response
        if response.is_success:
            connection.chunks = response.iter_bytes()
        else:
            response.read()
        return response

    def close_connection(self, connection: Connection) -> None:
        if connection.response is not None:
            connection.response.close()


class AsyncRuntime:
    """Performs effects with `await`. Many methods of the SDK can run at the same time.

    An effect describes one input or output, such as sending a request. Each method of the SDK is a generator of effects
    (see effects.py).
    """

    def __init__(
        self, http: httpx.AsyncClient, keys: Keys, policy: RetryPolicy, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self.http = http
        self.policy = policy
        self.keys = keys
        self._sleep = sleep

    async def run(self, steps: Steps[T]) -> T:
        """Performs all effects of the generator `steps`, and returns its result. `steps` must not emit events."""
        ended = await self.advance(steps)
        assert isinstance(ended, Ended)
        return ended.value

    async def advance(self, steps: Steps[T]) -> Ended[T] | Emit[Any] | Opened:
        """Performs the effects of the generator `steps` until `steps` emits an event, has opened its stream, or ends.

        Returns the effect Emit or Opened, or Ended with the result of `steps`.
        """
        answer: Any = None
        failure: APIConnectionError | None = None
        try:
            while True:
                effect = steps.send(answer) if failure is None else steps.throw(failure)
                if isinstance(effect, Emit | Opened):
                    return effect
                try:
                    answer, failure = await self._perform(effect), None
                except httpx.TransportError as error:
                    answer, failure = None, connection_error(error, self.http.base_url)
        except StopIteration as ended:
            return Ended(ended.value)

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Send(call):
                return await self.http.send(await build_request_async(self.http, call, self.keys))
            case OpenStream(call, connection):
                return await self._open(call, connection)
            case ReadStream(connection):
                return await anext(connection.chunks, None)
            case CloseStream(connection):
                return await self.close_connection(connection)
            case Sleep(seconds):
                return await self._sleep(seconds)
            case RunTools(calls, tools, timeout):
                return await run_tools(calls, tools, timeout)
        raise AssertionError(f"unknown effect {effect!r}")

    async def _open(self, call: Call, connection: Connection) -> httpx.Response:
        await self.close_connection(connection)
        response = await self.http.send(await build_request_async(self.http, call, self.keys), stream=True)
        connection.response = response
        if response.is_success:
            connection.chunks = response.aiter_bytes()
        else:
            await response.aread()
        return response

    async def close_connection(self, connection: Connection) -> None:
        if connection.response is not None:
            await connection.response.aclose()


Runtime = SyncRuntime | AsyncRuntime
