"""Lets web pages of other origins call the server from a browser (CORS). Off unless the operator names origins.

Owns which methods and headers such pages may use, and which headers of an answer they may read. Keys travel in
headers, so credentials of the browser (cookies) are never allowed.
Looks only at requests and at the beginning of answers: the pieces of a stream do not pass through here (`SEND_BODY` in
middleware.py), so streams cost no more time.
"""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "PATCH", "PUT", "DELETE")
EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-graftwork-model",
    "x-graftwork-unenforced",
    "idempotent-replayed",
    "x-graftwork-ignored",
    "www-authenticate",
)
"""The headers of an answer that a page may read, besides those that browsers always show."""
_PREFLIGHT_FOR_S = 600


def allow_origins(app: Starlette, origins: Sequence[str]) -> None:
    """Adds CORS for the pages of these origins, such as `https://chat.example.com`, to an application.

    `*` allows every origin. Without origins, does nothing: then a browser refuses the answers to other origins' pages.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
            max_age=_PREFLIGHT_FOR_S,
        )
