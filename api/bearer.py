"""Where a request carries its key."""

from fastapi import Request

from graftwork.platform.errors import NotAuthenticated


def presented_key(request: Request) -> str:
    """The token of `Authorization: Bearer …`, or `x-api-key`. Raises NotAuthenticated; never shows the key."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key
    raise NotAuthenticated("Send your API key as `Authorization: Bearer gw_…`.", code="missing_api_key")
