"""Reads, sets and clears the cookie of the web console, and refuses requests that another site has made a browser send.

Owns the cookie's name and attributes, and the header of the token against forged requests (CSRF). The cookie holds a
ticket (`platform/keys/console_tickets.py`), never an API key. No script can read it, and browsers send it only with
requests that pages of this origin make.
A header with a key goes before the cookie, so clients without cookies never notice any of this.
Source: OWASP, Cross-Site Request Forgery Prevention Cheat Sheet: a token in a custom header, and the check of the origin.
"""

from urllib.parse import urlsplit

from fastapi import Request, Response

from graftwork.platform.errors import NotPermitted

CSRF_HEADER = "x-graftwork-csrf"
_NAME = "graftwork_console"
_SECURE_NAME = f"__Host-{_NAME}"
"""Browsers accept a cookie with this prefix only over TLS, and only from this very host."""
_SIGN_IN_NAME = "graftwork_sign_in"
_SAFE_METHODS = frozenset({"GET", "HEAD"})


def ticket_in(request: Request) -> str | None:
    """Returns the ticket in the request's cookie. None if there is no cookie, or if the request has a key in a header."""
    headers = request.headers
    if "authorization" in headers or "x-api-key" in headers:
        return None
    return request.cookies.get(_name(request)) or None


def changes_state(request: Request) -> bool:
    """Returns whether the request needs a CSRF token."""
    return request.method not in _SAFE_METHODS


def refuse_other_origins(request: Request) -> None:
    """Raises NotPermitted if the browser says that a page of another origin has sent the request.

    Compares the host and the port, and not the scheme, which a proxy that ends TLS may hide.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    is_own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if site not in ("same-origin", "none") or not is_own:
        raise NotPermitted("A page of another site has sent this request: use the console itself.", code="other_origin")


def forged() -> NotPermitted:
    """Returns the error for a request whose CSRF token is missing or wrong."""
    return NotPermitted(
        f"The header {CSRF_HEADER} is missing, or belongs to another sign-in: reload the console.", code="csrf_token"
    )


def set_ticket(request: Request, response: Response, ticket: str, seconds: int) -> None:
    """Makes the browser keep the ticket for this many seconds."""
    response.set_cookie(
        _name(request), ticket, max_age=seconds, path="/", secure=_is_tls(request), httponly=True, samesite="strict"
    )


def clear_ticket(request: Request, response: Response) -> None:
    """Makes the browser forget its ticket."""
    response.delete_cookie(_name(request), path="/", secure=_is_tls(request), httponly=True, samesite="strict")


def set_sign_in(request: Request, response: Response, text: str, seconds: int) -> None:
    """Makes the browser keep what binds a sign-in with the identity provider to it, for this many seconds.

    It is `SameSite=Lax`: the browser must send it when the provider, another site, sends the browser back.
    """
    response.set_cookie(
        _sign_in_name(request), text, max_age=seconds, path="/", secure=_is_tls(request), httponly=True, samesite="lax"
    )


def sign_in_of(request: Request) -> str:
    """Returns what `set_sign_in` has set; empty without it."""
    return request.cookies.get(_sign_in_name(request)) or ""


def clear_sign_in(request: Request, response: Response) -> None:
    """Makes the browser forget a sign-in that has ended."""
    response.delete_cookie(_sign_in_name(request), path="/", secure=_is_tls(request), httponly=True, samesite="lax")


def _name(request: Request) -> str:
    return _SECURE_NAME if _is_tls(request) else _NAME


def _sign_in_name(request: Request) -> str:
    return f"__Host-{_SIGN_IN_NAME}" if _is_tls(request) else _SIGN_IN_NAME


def _is_tls(request: Request) -> bool:
    return request.url.scheme == "https"
