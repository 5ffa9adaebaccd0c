"""Reads adapters from web servers and from the Hugging Face Hub, over HTTPS.

    URL ──► resolve, check the address ──► GET ──► 200: the file
     ▲                                      └────► 3xx: the next URL, at most 5 times
     └─────────────────────────────────────────────────┘

Owns the requests: where each connects, and which redirects it follows. Never sends a key or token: a tenant must not read
what only the operator may. Uses no proxy of the environment.
Invariant: each connection goes to an address that was checked right before, after each redirect too. Only the Hub's own
address, which the operator chooses, may be an inner one.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote, urljoin, urlsplit

import httpx

from graftwork.adapters.sources.remote_file import RemoteFile, refused, unavailable
from graftwork.adapters.sources.source import AdapterSource, SourceKind, SourceRules, parse_source
from graftwork.platform.errors import GraftworkError, ValidationFailed
from graftwork.platform.outbound.public_addresses import (
    Destination,
    InwardAddress,
    Resolve,
    UnknownHost,
    find_destination,
    resolve_host,
)

HUB = "https://huggingface.co"
_MOST_REDIRECTS = 5
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_HEADERS = {"user-agent": "graftwork-adapters", "accept-encoding": "identity"}
_COMMIT_HEADER = "x-repo-commit"


class WebReader:
    """Reads the files of sources on the web and on the Hub."""

    def __init__(
        self,
        allowed_networks: tuple[str, ...] = (),
        *,
        rules: SourceRules | None = None,
        hub: str = HUB,
        resolve: Resolve = resolve_host,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """`allowed_networks` are inner networks that sources may be in. `rules` hold for redirects of web servers too.

        `hub` is the address of the Hub or of a mirror. `trusted` has the authorities whose certificates are accepted; None
        means the usual ones.
        """
        self._allowed_networks = allowed_networks
        self._rules = rules or SourceRules(("https:",))
        self._hub = hub.rstrip("/")
        self._resolve = resolve
        self._trusted = trusted

    @asynccontextmanager
    async def open(self, source: AdapterSource, path: str) -> AsyncGenerator[RemoteFile]:
        """Opens one file of a source. Raises ValidationFailed and Unavailable."""
        if self._trusted is None:
            self._trusted = await asyncio.to_thread(ssl.create_default_context)  # it reads hundreds of certificates
        async with httpx.AsyncClient(
            follow_redirects=False, trust_env=False, timeout=_TIMEOUT, verify=self._trusted
        ) as client:
            try:
                response, commit = await self._get(client, source, path)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise unavailable(source, type(error).__name__) from error
            try:
                self._check(source, path, response)
                pinned = source.at(commit) if commit else source
                yield RemoteFile(_length(response), pinned, _chunks(source, response))
            finally:
                await response.aclose()

    async def _get(
        self, client: httpx.AsyncClient, source: AdapterSource, path: str
    ) -> tuple[httpx.Response, str | None]:
        """Follows redirects to the file. Returns the open answer, and the commit that the Hub named."""
        url, commit = self._url(source, path), None
        for hop in range(_MOST_REDIRECTS + 1):
            destination = await self._destination(source, url, is_first=hop == 0)
            request = client.build_request(
                "GET",
                destination.url,
                headers={**_HEADERS, "host": destination.host},
                extensions={"sni_hostname": destination.server_name},
            )
            response = await client.send(request, stream=True)
            if source.kind is SourceKind.HUB and self._is_hub(url):
                commit = response.headers.get(_COMMIT_HEADER, commit)
            if not response.has_redirect_location:
                return response, commit
            await response.aclose()
            url = urljoin(url, response.headers["location"])
        raise refused(source, f"redirects more than {_MOST_REDIRECTS} times")

    def _url(self, source: AdapterSource, path: str) -> str:
        if source.kind is SourceKind.HUB:
            return f"{self._hub}/{source.place}/resolve/{quote(source.revision, safe='')}/{quote(path)}"
        return f"https://{source.place}/{path}" + (f"?{source.query}" if source.query else "")

    async def _destination(self, source: AdapterSource, url: str, *, is_first: bool) -> Destination:
        """Returns where to connect for a URL. Raises ValidationFailed for an inner address."""
        parts = urlsplit(url)
        if source.kind is SourceKind.HUB and self._is_hub(url):
            networks: tuple[str, ...] = ("0.0.0.0/0", "::/0")
        elif parts.scheme != "https":
            raise refused(source, "redirects to an address without TLS")
        else:
            networks = self._allowed_networks
        if not is_first and source.kind is SourceKind.WEB:
            self._check_redirect(source, url)
        try:
            return await find_destination(url, networks, self._resolve)
        except InwardAddress:
            raise refused(source, "leads to an address that is not public") from None
        except UnknownHost:
            raise unavailable(source, "its host has no address") from None
        except ValidationFailed:
            raise refused(source, "redirects to an address that is not allowed") from None

    def _check_redirect(self, source: AdapterSource, url: str) -> None:
        try:
            self._rules.check(parse_source(url), "")
        except GraftworkError:
            raise refused(source, "redirects to an address from which this server does not fetch") from None

    def _is_hub(self, url: str) -> bool:
        hub, other = urlsplit(self._hub), urlsplit(url)
        return (hub.scheme, hub.netloc) == (other.scheme, other.netloc)

    def _check(self, source: AdapterSource, path: str, response: httpx.Response) -> None:
        """Raises ValidationFailed for an answer that is not the file, and Unavailable if it may come later."""
        status = response.status_code
        if status >= 500 or status in (408, 425, 429):
            raise unavailable(source, f"it answers with HTTP {status}")
        if status in (401, 403, 404, 410):
            name = path.rpartition("/")[2]
            raise refused(source, f"has no {name} that this server may read (HTTP {status})")
        if status != 200:
            raise refused(source, f"answers with HTTP {status}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise refused(source, "sends its files compressed, which is not accepted")


def _length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() else None


async def _chunks(source: AdapterSource, response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except (httpx.HTTPError, OSError) as error:
        raise unavailable(source, f"its connection broke ({type(error).__name__})") from error
