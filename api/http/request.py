"""Reads a request's body up to a limit, and finds the request's API key.

The limit counts bytes as they arrive. So a false `content-length` or a chunked body cannot exceed it.
"""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.types import Receive, Scope

from graftwork.api.http.json_body import parse_json
from graftwork.platform.errors import InvalidRequest, NotAuthenticated, PayloadTooLarge

JSON_BODY_BYTES = 8 * 1024 * 1024


UPLOAD_BODY_BYTES = 256 * 1024 * 1024
"""The largest upload. An adapter of rank 64 on every module of an 8B model has about 170 MB in half precision."""


class BoundedRequest(Request):
    """A request whose body has a limit in bytes. Routes for JSON and for uploads use it."""

    def __init__(self, scope: Scope, receive: Receive, *, limit_bytes: int, wants_json: bool) -> None:
        super().__init__(scope, receive)
        self._limit_bytes = limit_bytes
        self._wants_json = wants_json
        self._parsed: list[Any] = []

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Read the body in chunks. Raises PayloadTooLarge at the first byte over the limit."""
        self._refuse_declared_length()
        received_bytes = 0
        async for chunk in super().stream():
            received_bytes += len(chunk)
            if received_bytes > self._limit_bytes:
                raise self._too_large()
            yield chunk

    async def body(self) -> bytes:
        """Read the whole body. Raises InvalidRequest if the route expects JSON and the content type is not JSON."""
        body = await super().body()
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and self._wants_json and kind != "application/json" and not kind.endswith("+json"):
            raise InvalidRequest("Send the body as JSON, with `content-type: application/json`.", param="content-type")
        return body

    async def json(self) -> Any:
        """Parse the body as JSON, only once. Raises InvalidRequest if the JSON is invalid or nests too deep."""
        if not self._parsed:
            self._parsed.append(parse_json(await self.body()))
        return self._parsed[0]

    def _refuse_declared_length(self) -> None:
        if "content-encoding" in self.headers and self.headers["content-encoding"].lower() != "identity":
            raise InvalidRequest(
                "Compressed bodies are not accepted: send the body as it is.", param="content-encoding"
            )
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit_bytes:
            raise self._too_large()

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than the {self._limit_bytes} bytes that this route takes.")


def presented_key(request: Request) -> str:
    """Return the key from `Authorization: Bearer …` or `x-api-key`. Raises NotAuthenticated if there is no key."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key
    raise NotAuthenticated("Send your API key as `Authorization: Bearer gw_…`.", code="missing_api_key")
