"""Reads what an OpenID Connect provider publishes: its discovery document and its signing keys.

    issuer/.well-known/openid-configuration ──► endpoints ──► keys of jwks_uri

Owns both in memory. The document is read again after an hour. The keys too, and when a token names an unknown key, which
is how a provider changes its keys: then at most every 10 seconds, so that forged tokens cannot make the gateway ask more
often. If the provider does not answer, what was read before goes on being used.
Follows no redirect, and reads no more than 1 MiB. Every address must be HTTPS, or on this machine.
Source: OpenID Connect Discovery 1.0, sections 3 and 4; OpenID Connect Core 1.0, section 10.1.1 (rotation).
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable
from graftwork.platform.settings.people import is_safe_url

_log = logging.getLogger(__name__)

FRESH_FOR_S = 3600.0
"""For how long a document is used before it is read again."""
RETRY_S = 10.0
"""The shortest time between two reads because of an unknown key, or after a failure."""
_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 20
_DOCUMENT = "/.well-known/openid-configuration"

OpenHttp = Callable[[], httpx.AsyncClient]
"""Makes the client for one exchange with the provider."""


def open_http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False, headers={"accept": "application/json"})


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a provider."""

    issuer: str
    authorization: str
    token: str
    keys: str


class _Cached:
    """A JSON document of the provider, and when it was read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.value: Mapping[str, Any] | None = None
        self._read_at = float("-inf")
        self._waits_until = float("-inf")

    @property
    def is_fresh(self) -> bool:
        return self.value is not None and self._clock.monotonic() - self._read_at < FRESH_FOR_S

    @property
    def may_try(self) -> bool:
        return self._clock.monotonic() >= self._waits_until

    def wait(self) -> None:
        """Lets nobody read again for a while."""
        self._waits_until = self._clock.monotonic() + RETRY_S

    def keep(self, value: Mapping[str, Any]) -> None:
        self.value, self._read_at = value, self._clock.monotonic()


class Provider:
    """One OpenID Connect provider. Tests replace `open_http`."""

    def __init__(self, issuer: str, clock: Clock, open_http: OpenHttp = open_http) -> None:
        self.issuer = issuer
        self._open_http = open_http
        self._document = _Cached(clock)
        self._keys = _Cached(clock)

    async def endpoints(self) -> Endpoints:
        """Returns the provider's addresses. Raises Unavailable if they cannot be read and were never read."""
        document = await self._fresh(self._document, self.issuer.rstrip("/") + _DOCUMENT)
        return self._checked(document)

    async def signing_keys(self, *, again: bool = False) -> list[Mapping[str, Any]]:
        """Returns the keys as JWKs. `again` asks for keys that are newer than those known, if that is not too often."""
        address = (await self.endpoints()).keys
        found = await self._fresh(self._keys, address, again=again)
        keys = found.get("keys")
        return [key for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []

    async def post_form(self, address: str, form: Mapping[str, str], auth: tuple[str, str] | None) -> httpx.Response:
        """Sends a form to the provider, and returns its answer, whatever its status. Raises Unavailable."""
        try:
            async with self._open_http() as http:
                return await http.post(
                    address, data=dict(form), auth=auth if auth is not None else httpx.USE_CLIENT_DEFAULT
                )
        except httpx.HTTPError as error:
            raise _away(f"{type(error).__name__}") from error

    async def _fresh(self, cached: _Cached, address: str, *, again: bool = False) -> Mapping[str, Any]:
        if (again or not cached.is_fresh) and cached.may_try:
            if again:
                cached.wait()
            try:
                cached.keep(await self._get(address))
            except Unavailable as error:
                cached.wait()
                if cached.value is None:
                    raise
                _log.warning("oidc_provider_away", extra={"address": address, "reason": error.message})
        if cached.value is None:
            raise _away("it did not answer a moment ago")
        return cached.value

    async def _get(self, address: str) -> Mapping[str, Any]:
        try:
            async with self._open_http() as http, http.stream("GET", address) as answer:
                if answer.status_code != 200:
                    raise _away(f"{address} answered {answer.status_code}")
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise _away(f"{address} answered more than {_MOST_BYTES} bytes")
            found = json.loads(body)
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise _away(f"{address}: {type(error).__name__}") from error
        if not isinstance(found, dict):
            raise _away(f"{address} answered no JSON object")
        return found

    def _checked(self, document: Mapping[str, Any]) -> Endpoints:
        if document.get("issuer") != self.issuer:
            raise _away(f"its document names the issuer {document.get('issuer')!r}; oidc_issuer must be the same text")
        names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        addresses = [document.get(name) for name in names]
        for name, address in zip(names, addresses, strict=True):
            if not isinstance(address, str) or not is_safe_url(address.partition("?")[0]):
                raise _away(f"its document has no {name} of HTTPS")
        return Endpoints(self.issuer, *(str(address) for address in addresses))


def _away(reason: str) -> Unavailable:
    return Unavailable(
        f"The identity provider cannot be used now: {reason}. Try again in a moment.", code="oidc_provider_away"
    )
