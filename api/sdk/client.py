"""Defines two clients: `Graftwork` for synchronous code, and `AsyncGraftwork` for asyncio.

Both clients have the same methods, and share the code of these methods (see transport/operation.py).

    client = Graftwork(api_key="gw_…")
    session = client.sessions.create(model="support", tools=[…])
    print(session.run("Where is my order?", tools={"get_order": get_order}).text)
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, Self

import httpx

from graftwork import __version__
from graftwork.api.sdk.account import OwnQuota, Timelines, UsageLedger
from graftwork.api.sdk.adapters import Adapters
from graftwork.api.sdk.admin import Admin
from graftwork.api.sdk.batches import Batches, Files
from graftwork.api.sdk.chat import Chat, Models
from graftwork.api.sdk.data_rights import Exports, OwnRetention
from graftwork.api.sdk.embeddings import Embeddings
from graftwork.api.sdk.keys import Members, OwnKeys
from graftwork.api.sdk.login.login import Logins
from graftwork.api.sdk.overview import OwnOverview
from graftwork.api.sdk.people import Auth
from graftwork.api.sdk.sessions import Sessions
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.api.sdk.transport.operation import R
from graftwork.api.sdk.transport.retries import RetryPolicy
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, Keys, SyncRuntime

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0


class ApiClient(Generic[R]):
    """The base class of both clients. Its attributes, such as `sessions`, are objects with the methods of the API."""

    def __init__(self, runtime: R) -> None:
        self._runtime: R = runtime
        self.chat: Chat[R] = Chat(runtime)
        self.embeddings: Embeddings[R] = Embeddings(runtime)
        self.models: Models[R] = Models(runtime)
        self.adapters: Adapters[R] = Adapters(runtime)
        self.sessions: Sessions[R] = Sessions(runtime)
        self.files: Files[R] = Files(runtime)
        self.batches: Batches[R] = Batches(runtime)
        self.exports: Exports[R] = Exports(runtime)
        self.retention: OwnRetention[R] = OwnRetention(runtime)
        self.usage: UsageLedger[R] = UsageLedger(runtime)
        self.quota: OwnQuota[R] = OwnQuota(runtime)
        self.overview: OwnOverview[R] = OwnOverview(runtime)
        self.timelines: Timelines[R] = Timelines(runtime)
        self.keys: OwnKeys[R] = OwnKeys(runtime)
        self.members: Members[R] = Members(runtime)
        self.auth: Auth[R] = Auth(runtime)
        self.admin: Admin[R] = Admin(runtime)

    @property
    def has_admin_key(self) -> bool:
        """Whether the client has an admin key, or acts as a person who is an operator."""
        return self._runtime.keys.has_admin

    @property
    def base_url(self) -> str:
        return str(self._runtime.http.base_url).rstrip("/")


class Graftwork(ApiClient[SyncRuntime]):
    """The synchronous client. Use it in a `with` block, or close it.

    The environment variables GRAFTWORK_URL, GRAFTWORK_API_KEY and GRAFTWORK_ADMIN_KEY supply missing arguments. Without
    a key, the client acts as the person who has signed in with `graftwork login` at this server.
    `timeout` is in seconds. `max_retries` is the number of tries after the first one. Tests replace `transport` and
    `sleep`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        *,
        timeout: float = ANSWER_TIMEOUT_S,
        max_retries: int = 2,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        http = httpx.Client(
            base_url=base_url_of(base_url), timeout=_timeout(timeout), transport=transport, headers=_headers()
        )
        super().__init__(
            SyncRuntime(http, _keys(base_url_of(base_url), api_key, admin_key), RetryPolicy(max_retries), sleep)
        )

    def close(self) -> None:
        self._runtime.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncGraftwork(ApiClient[AsyncRuntime]):
    """The client for asyncio. It takes the same arguments as `Graftwork`. Use it in `async with`, or close it."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        *,
        timeout: float = ANSWER_TIMEOUT_S,
        max_retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        http = httpx.AsyncClient(
            base_url=base_url_of(base_url), timeout=_timeout(timeout), transport=transport, headers=_headers()
        )
        super().__init__(
            AsyncRuntime(http, _keys(base_url_of(base_url), api_key, admin_key), RetryPolicy(max_retries), sleep)
        )

    async def close(self) -> None:
        await self._runtime.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def base_url_of(given: str | None) -> str:
    """Returns the server's address without `/v1` at the end. An address without a scheme gets `http://`.

    Raises ConfigurationError if the address is not one of HTTP.
    """
    url = (given or os.environ.get("GRAFTWORK_URL") or DEFAULT_URL).strip()
    url = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise _wrong_url(url) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _wrong_url(url)
    return url.rstrip("/").removesuffix("/v1")


def _wrong_url(url: str) -> ConfigurationError:
    return ConfigurationError(f"{url!r} is no server's address: give GRAFTWORK_URL as http://HOST:PORT.")


def _keys(url: str, api_key: str | None, admin_key: str | None) -> Keys:
    """Returns the keys that were given. For one that is missing, the token of the person who has signed in is used."""
    return Keys(
        api_key or os.environ.get("GRAFTWORK_API_KEY") or None,
        admin_key or os.environ.get("GRAFTWORK_ADMIN_KEY") or None,
        lambda admin: Logins().token(url, admin=admin),
    )


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(CONNECT_TIMEOUT_S, seconds))


def _headers() -> dict[str, str]:
    return {"user-agent": f"graftwork-python/{__version__}"}
