"""Reads a request's body and API key, and builds the headers that name what the server does not enforce or ignores.

Owns the limit of the body in bytes. Counts the bytes as they arrive, so a false `content-length` has no effect.
Passes a long JSON body to the function `parse_long` of the route, which parses the body in another process. Never
checks a schema, and never holds an uploaded file in memory.

A client sends JSON Schemas in fields such as `tools`. Each part of a schema that the server does not enforce is written
as the field's name and a JSON pointer into the schema. A header of at most 2000 characters, which every client and
proxy accepts, lists these parts:

    x-graftwork-unenforced: tools[0].function.parameters#/properties/id/format, +3 more

Another header of the same form lists the parts of the request that the server understands, but leaves out, because it
cannot serve them and the answer can do without them. Each part is its path in the body, then what it is:

    x-graftwork-ignored: tools[2] (web_search), input[4] (reasoning)
"""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.types import Receive, Scope

from graftwork.api.http.console_cookie import ticket_in
from graftwork.api.http.response_headers import IGNORED, UNENFORCED
from graftwork.platform.errors import InvalidRequest, NotAuthenticated, PayloadTooLarge
from graftwork.platform.quotas.uploads import UploadPlace
from graftwork.platform.strict_json import parse_json

_MOST_CHARACTERS = 2000


_READABLE = "/#[]$~:@!*+=-._"


def unenforced_header(places: Sequence[str], rename: Callable[[str], str] = str) -> Mapping[str, str]:
    """Returns a response header that lists the parts of the client's JSON Schemas that the server does not enforce.

    If `places` is empty, returns an empty mapping. Each place is the name of a body field and a JSON pointer into its
    schema.
    `rename` converts the field names of chat completions to the names of the route's API.
    """
    return _listing(UNENFORCED, [quote(rename(place), safe=_READABLE) for place in places])


def ignored_header(places: Sequence[str]) -> Mapping[str, str]:
    """Returns a response header that lists the parts of the request that the server has ignored.

    If `places` is empty, returns an empty mapping. Each place is a path in the request's body, with what was there in
    parentheses, such as `tools[2] (web_search)`.
    """
    return _listing(IGNORED, [quote(place, safe=_READABLE + " ()", errors="replace") for place in places])


def _listing(name: str, places: Sequence[str]) -> Mapping[str, str]:
    """Returns the header `name` with as many of the places as fit in, and the number of the others."""
    shown: list[str] = []
    length = 0
    for place in places:
        shown.append(place)
        length += len(place) + 2
        if length > _MOST_CHARACTERS:
            shown.pop()
            break
    left_out = len(places) - len(shown)
    return {name: ", ".join([*shown, f"+{left_out} more"] if left_out else shown)} if places else {}


JSON_BODY_BYTES = 8 * 1024 * 1024


UPLOAD_BODY_BYTES = 256 * 1024 * 1024
"""The largest upload. An adapter of rank 64 on every module of an 8B model has about 170 MB in half precision."""


LONG_JSON_BYTES = 64 * 1024
"""A longer JSON body is parsed in another process, because Python's parser blocks all threads until it ends."""

_MOST_PARTS = 8
"""The most files of a form, and the most other fields. Each may take a megabyte of memory before it goes to disk."""

ParseLong = Callable[[bytes], Awaitable[Any]]
"""Parses a long body off the event loop. Raises InvalidRequest with the reason."""


class BoundedRequest(Request):
    """A request whose body may have at most `limit_bytes` bytes."""

    limit_bytes = JSON_BODY_BYTES

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the body in chunks. Raises PayloadTooLarge when the body exceeds the limit."""
        self._refuse_declared_length()
        received_bytes = 0
        async for chunk in super().stream():
            received_bytes += len(chunk)
            if received_bytes > self.limit_bytes:
                raise self._too_large()
            yield chunk

    async def digest(self) -> str:
        """Returns the SHA-256 of method, path and body, in hex. Reads the whole body."""
        raise NotImplementedError

    def _refuse_declared_length(self) -> None:
        if "content-encoding" in self.headers and self.headers["content-encoding"].lower() != "identity":
            raise InvalidRequest(
                "Compressed bodies are not accepted: send the body as it is.", param="content-encoding"
            )
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.limit_bytes:
            raise self._too_large()

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than the {self.limit_bytes} bytes that this route takes.")

    def _begin_digest(self) -> "hashlib._Hash":
        return hashlib.sha256(f"{self.method} {self.url.path}\n".encode())


class JsonRequest(BoundedRequest):
    """A request whose body is JSON, or empty. Memory holds the body."""

    def __init__(self, scope: Scope, receive: Receive, parse_long: ParseLong) -> None:
        super().__init__(scope, receive)
        self._parse_long = parse_long
        self._parsed: list[Any] = []

    async def body(self) -> bytes:
        """Reads the whole body. Raises InvalidRequest if the content type is not JSON."""
        body = await super().body()
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind != "application/json" and not kind.endswith("+json"):
            raise InvalidRequest("Send the body as JSON, with `content-type: application/json`.", param="content-type")
        return body

    async def json(self) -> Any:
        """Parses the body as JSON, only once. Raises InvalidRequest if the JSON is invalid or nests too deep."""
        if not self._parsed:
            body = await self.body()
            self._parsed.append(await self._parse_long(body) if len(body) > LONG_JSON_BYTES else parse_json(body))
        return self._parsed[0]

    async def digest(self) -> str:
        digest = self._begin_digest()
        digest.update(await self.body())
        return digest.hexdigest()


class UploadRequest(BoundedRequest):
    """A request whose body is a form with files. Memory holds a few chunks; the files go to disk while they arrive."""

    limit_bytes = UPLOAD_BODY_BYTES

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._place: UploadPlace | None = None
        _, options = parse_options_header(self.headers.get("content-type"))
        self._boundary = options.get(b"boundary", b"")
        self._digest = self._begin_digest()
        self._unread = b""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the body in chunks, and computes its digest. Raises RequestTimeout if the body arrives too slowly."""
        async for chunk in super().stream():
            if self._place is not None:
                self._place.check()
            self._add_to_digest(chunk)
            yield chunk

    async def read_form(self, place: UploadPlace | None = None) -> None:
        """Receives the whole form, as long as the upload has its place. The handler of the route then gets it without
        waiting.

        Raises HTTPException if the form cannot be read, or has too many parts. Raises RequestTimeout if it arrives too
        slowly.
        """
        self._place = place
        await self.form(max_files=_MOST_PARTS, max_fields=_MOST_PARTS)

    async def digest(self) -> str:
        """Leaves out the boundary between the parts, because clients choose a new one each time."""
        await self.read_form()
        digest = self._digest.copy()
        digest.update(self._unread)
        return digest.hexdigest()

    def _add_to_digest(self, chunk: bytes) -> None:
        """Adds everything but the boundary. Keeps the last bytes until the next chunk, because a boundary may begin in
        them.
        """
        if not self._boundary:
            self._digest.update(chunk)
            return
        *whole, last = (self._unread + chunk).split(self._boundary)
        for piece in whole:
            self._digest.update(piece)
        kept = min(len(self._boundary) - 1, len(last))
        self._digest.update(last[: len(last) - kept])
        self._unread = last[len(last) - kept :]


class PartRequest(BoundedRequest):
    """A request whose body is a part of a file, as it is. Memory holds one chunk."""

    def __init__(self, scope: Scope, receive: Receive, limit_bytes: int) -> None:
        super().__init__(scope, receive)
        self.limit_bytes = limit_bytes
        self._place: UploadPlace | None = None

    def hold(self, place: UploadPlace) -> None:
        """Lets the body arrive only as long as the upload has its place."""
        self._place = place

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the body in chunks. Raises InvalidRequest if it is not sent as bytes, and RequestTimeout if it arrives
        too slowly.
        """
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/octet-stream":
            message = "Send a part as it is, with `content-type: application/octet-stream`."
            raise InvalidRequest(message, param="content-type")
        async for chunk in super().stream():
            if self._place is not None:
                self._place.check()
            yield chunk


def presented_key(request: Request) -> str:
    """Returns the key from `Authorization: Bearer …` or `x-api-key`, or the ticket in the cookie of the web console.

    Raises NotAuthenticated if there is none of these.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key
    if ticket := ticket_in(request):
        return ticket
    raise NotAuthenticated("Send your API key as `Authorization: Bearer gw_…`.", code="missing_api_key")


def client_address(request: Request) -> str:
    """Returns the client's address. Behind a trusted proxy, it is the address that the proxy saw."""
    return "" if request.client is None else request.client.host
