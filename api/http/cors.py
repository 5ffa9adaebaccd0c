"""Lets web pages of other origins call the server from a browser (CORS). Off unless the operator names origins.

Owns which methods and headers such pages may use. They may read all headers in `response_headers.py`. Keys travel in
headers, so credentials of the browser (cookies) are never allowed.
Looks only at requests and at the beginning of answers: the pieces of a stream do not pass through here (`WRITE_BODY` in
streaming.py), so streams cost no more time.
"""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from graftwork.api.http.response_headers import HEADERS

METHODS = ("GET", "HEAD", "POST", "PATCH", "PUT", "DELETE")
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
            expose_headers=tuple(HEADERS),
            max_age=_PREFLIGHT_FOR_S,
        )
