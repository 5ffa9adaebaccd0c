"""Refuses a request that has the web console's cookie, unless the console itself has sent it.

Never authenticates: the cookie's ticket is checked as a key is.
"""

from fastapi import Request

from graftwork.api.deps.resources import resources_of
from graftwork.api.http.console_cookie import CSRF_HEADER, changes_state, forged, refuse_other_origins, ticket_in


def refuse_forged(request: Request) -> None:
    """Does nothing for a request with a key in a header, or without a cookie.

    Raises NotPermitted if another origin has sent the request, or if it changes something and lacks the CSRF token.
    """
    ticket = ticket_in(request)
    if ticket is None:
        return
    refuse_other_origins(request)
    token = request.headers.get(CSRF_HEADER, "")
    if changes_state(request) and not resources_of(request).server.gate.is_csrf_token(token, ticket):
        raise forged()
