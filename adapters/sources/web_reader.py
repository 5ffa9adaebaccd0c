"""Reads adapters from web servers and from the Hugging Face Hub, over HTTPS.

    URL ──► resolve, check the address ──► GET ──► 200: the file
     ▲                                      └────► 3xx: the next URL, at most 5 times
     └─────────────────────────────────────────────────┘

    the connection breaks ──► GET with the range of what is missing ──► 206 of the same entity tag: the rest

Owns the requests: where each connects, and which redirects it follows. The operator's token goes to the Hub's own address
alone, and only for organisations that a rule of the operator names: a tenant must not read what only the operator may.
Uses no proxy of the environment.
Invariant: each connection goes to an address that was checked right before, after each redirect too. Only the Hub's own
address, which the operator chooses, may be an inner one.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
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
_MOST_RESUMPTIONS = 10
"""Connections of one file that may break. Each must have brought at least a byte."""
_HEADERS = {"user-agent": "graftwork-adapters", "accept-encoding": "identity"}
_COMMIT_HEADER = "x-repo-commit"
_NOTHING_MORE: Mapping[str, str] = MappingProxyType({})
_STRONG_TAG = re.compile(r'"[^"]+"')
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<size>\d+)", re.ASCII)


@dataclass(slots=True)
class _Download:
    """One file on its way."""

    response: httpx.Response
    """The answer that brings the bytes now."""
    size: int | None
    tag: str | None
    """The entity tag, which says whether two answers are of the same bytes; None if the server gives none that is strong."""
    received: int = 0
    num_broken: int = 0

    @classmethod
    def of(cls, response: httpx.Response) -> "_Download":
        tag = response.headers.get("etag", "")
        return cls(response, _length(response), tag if _STRONG_TAG.fullmatch(tag) else None)

    def continues_with(self, response: httpx.Response) -> bool:
        """Returns whether an answer has the rest of the same bytes."""
        found = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status_code != 206 or found is None or response.headers.get("etag") != self.tag:
            return False
        return int(found["first"]) == self.received and self.size in (None, int(found["size"])) and _is_plain(response)


class WebReader:
    """Reads the files of sources on the web and on the Hub."""

    def __init__(
        self,
        allowed_networks: tuple[str, ...] = (),
        *,
        rules: SourceRules | None = None,
        hub: str = HUB,
        hub_token: str | None = None,
        resolve: Resolve = resolve_host,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """`allowed_networks` are inner networks that sources may be in. `rules` hold for redirects of web servers too.

        `hub` is the address of the Hub or of a mirror, and `hub_token` the operator's token there. `trusted` has the
        authorities whose certificates are accepted; None means the usual ones.
        """
        self._allowed_networks = allowed_networks
        self._rules = rules or SourceRules(("https:",))
        self._hub = hub.rstrip("/")
        self._hub_token = hub_token
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
            download = _Download.of(response)
            try:
                self._check(source, path, response)
                pinned = source.at(commit) if commit else source
                yield RemoteFile(download.size, pinned, self._chunks(client, pinned, path, download))
            finally:
                await download.response.aclose()

    async def _chunks(
        self, client: httpx.AsyncClient, source: AdapterSource, path: str, download: _Download
    ) -> AsyncIterator[bytes]:
        """Yields the content. Where its connection breaks, asks for the rest over another one."""
        while True:
            before = download.received
            try:
                async for chunk in download.response.aiter_raw():
                    download.received += len(chunk)
                    yield chunk
                return
            except (httpx.HTTPError, OSError) as error:
                download.num_broken += 1
                may_go_on = download.received > before and download.num_broken <= _MOST_RESUMPTIONS
                if not may_go_on or not await self._resume(client, source, path, download):
                    raise unavailable(source, f"its connection broke ({type(error).__name__})") from error

    async def _resume(self, client: httpx.AsyncClient, source: AdapterSource, path: str, download: _Download) -> bool:
        """Asks for the rest of a file. Returns whether it comes, of the same bytes."""
        await download.response.aclose()
        if download.tag is None:
            return False
        rest = {"range": f"bytes={download.received}-", "if-range": download.tag}
        try:
            download.response, _ = await self._get(client, source, path, rest)
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            return False
        return download.continues_with(download.response)

    async def _get(
        self, client: httpx.AsyncClient, source: AdapterSource, path: str, more: Mapping[str, str] = _NOTHING_MORE
    ) -> tuple[httpx.Response, str | None]:
        """Follows redirects to the file. Returns the open answer, and the commit that the Hub named.

        `more` are headers of the request.
        """
        url, commit = self._url(source, path), None
        for hop in range(_MOST_REDIRECTS + 1):
            destination = await self._destination(source, url, is_first=hop == 0)
            request = client.build_request(
                "GET",
                destination.url,
                headers={**_HEADERS, **more, **self._credentials(source, url), "host": destination.host},
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

    def _credentials(self, source: AdapterSource, url: str) -> Mapping[str, str]:
        """Returns the header with the operator's token, if this URL may get it."""
        if self._hub_token is None or not self._is_hub(url) or not self._rules.names_organisation(source):
            return _NOTHING_MORE
        return {"authorization": f"Bearer {self._hub_token}"}

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
        if not _is_plain(response):
            raise refused(source, "sends its files compressed, which is not accepted")


def _length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _is_plain(response: httpx.Response) -> bool:
    return bool(response.headers.get("content-encoding", "identity").lower() == "identity")
