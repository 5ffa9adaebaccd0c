"""Defines the routes of the web console: its page, its files, and the sign-in of a browser.

The console calls the same routes as every client, with a cookie instead of a key. So it shows what its key may see.
None of these routes is in the OpenAPI document: they serve only the console's own page.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import graftwork
from graftwork.api.console.files import CONTENT_SECURITY_POLICY, SECURITY_HEADERS, console_files
from graftwork.api.deps.resources import ForServer, resources_of
from graftwork.api.deps.route_classes import ConsoleRoute
from graftwork.api.http.console_cookie import clear_ticket, set_ticket
from graftwork.api.http.request import presented_key
from graftwork.api.people.views import session_fields
from graftwork.platform.errors import NotFound
from graftwork.platform.tenancy.authenticator import ConsoleSession
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal

_NO_STORE = {"cache-control": "no-store", **SECURITY_HEADERS}
_FOR_EVER = "public, max-age=31536000, immutable"

pages_router = APIRouter(include_in_schema=False)
session_router = APIRouter(prefix="/console/session", include_in_schema=False, route_class=ConsoleRoute)


@pages_router.get("/console")
async def get_console() -> Response:
    """Return the console's page. It loads nothing from another address."""
    page = console_files().page
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-cache", **SECURITY_HEADERS}
    return Response(page.body, media_type=page.media_type, headers=headers)


@pages_router.get("/console/static/{version}/{name:path}")
async def get_console_file(version: str, name: str) -> Response:
    """Return a script or a style of the console. The address has the version of all files, so browsers may keep them."""
    files = console_files()
    found = files.by_name.get(name)
    if found is None:
        raise NotFound(f"The console has no file {name!r}.", code="unknown_route")
    cache = _FOR_EVER if version == files.version else "no-store"  # another gateway may run another version
    return Response(found.body, media_type=found.media_type, headers={"cache-control": cache, **SECURITY_HEADERS})


@session_router.post("", status_code=201)
async def sign_in(request: Request, resources: ForServer) -> JSONResponse:
    """Set the cookie for the key in `Authorization`, or renew the cookie. Of a person's session, only renew it."""
    session = await resources.gate.open_session(request.state.principal, presented_key(request))
    answer = JSONResponse(await _session_body(session, request), status_code=201, headers=_NO_STORE)
    set_ticket(request, answer, session.ticket, int(session.until - resources.clock.now()))
    return answer


@session_router.get("")
async def get_session(request: Request, resources: ForServer) -> JSONResponse:
    """Tell whose key the cookie stands for. Does not renew the cookie."""
    session = resources.gate.present_session(request.state.principal, presented_key(request))
    return JSONResponse(await _session_body(session, request), headers=_NO_STORE)


@pages_router.delete("/console/session")
async def sign_out(request: Request) -> Response:
    """Clear the cookie. This needs no valid key, so that a page can always leave."""
    answer = Response(status_code=204, headers=_NO_STORE)
    clear_ticket(request, answer)
    return answer


async def _session_body(session: ConsoleSession, request: Request) -> dict[str, Any]:
    """Returns what the page shows of the sign-in. Never contains the ticket."""
    principal = session.principal
    return {
        "object": "console.session",
        "role": "admin" if isinstance(principal, AdminPrincipal) else "tenant",
        "tenant": None if isinstance(principal, AdminPrincipal) else _tenant_body(principal),
        "may_change": principal.may_change if isinstance(principal, AdminPrincipal) else True,
        **await session_fields(principal, resources_of(request).people),
        "csrf_token": session.csrf_token,
        "until": session.until,
        "base_model": resources_of(request).inference.base_name,
        "version": graftwork.__version__,
    }


def _tenant_body(principal: Principal) -> dict[str, Any]:
    return {
        "id": principal.tenant_id,
        "name": principal.tenant_name,
        "key_id": principal.key_id,
        "scopes": sorted(principal.scopes),
    }
