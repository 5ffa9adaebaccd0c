"""Defines the routes by which a browser signs in with the identity provider, and changes what it acts as.

    GET /console/sign-in ──► the provider ──► GET /console/sign-in/callback ──► /console, with the console's cookie

A sign-in that fails comes back to the console's page as well, with the error's code in the address: never with its text,
which a link of somebody else could choose. None of these routes is in the OpenAPI document but `provider`'s form, which
docs/people.md describes: the command line reads it.
"""

import logging
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from graftwork.api.console.files import SECURITY_HEADERS
from graftwork.api.deps.people import PeopleResources
from graftwork.api.deps.resources import ForPeople
from graftwork.api.deps.route_classes import ConsoleRoute
from graftwork.api.http.console_cookie import (
    clear_sign_in,
    set_sign_in,
    set_ticket,
    sign_in_of,
)
from graftwork.api.http.request import presented_key
from graftwork.api.people.views import SeatBody
from graftwork.platform.errors import GraftworkError, NotPermitted
from graftwork.platform.ids import TenantId
from graftwork.platform.keys.console_tickets import ConsoleTicket
from graftwork.platform.oidc.code_flow import SIGN_IN_FOR_S

_log = logging.getLogger(__name__)

_CALLBACK = "/console/sign-in/callback"
_NO_STORE = {"cache-control": "no-store", **SECURITY_HEADERS}
_SEE_OTHER = 303

router = APIRouter(include_in_schema=False)
seat_router = APIRouter(prefix="/console/session", include_in_schema=False, route_class=ConsoleRoute)


@router.get("/console/sign-in/provider")
async def get_sign_in_provider(resources: ForPeople) -> JSONResponse:
    """Tell with what people sign in, which is no secret: the page and the command line ask before they have a key."""
    settings, found = resources.settings, None
    if resources.provider is not None:
        found = {
            "name": settings.oidc_name,
            "issuer": settings.oidc_issuer,
            "cli_client_id": settings.oidc_cli_client_id,
            "scopes": list(settings.oidc_scopes),
        }
    return JSONResponse({"object": "auth.provider", "provider": found}, headers=_NO_STORE)


@router.get("/console/sign-in")
async def begin_sign_in(request: Request, resources: ForPeople) -> Response:
    """Send the browser to the identity provider."""
    try:
        begun = await resources.required_provider().code_flow.begin(_redirect_uri(request, resources))
    except GraftworkError as error:
        return _failed(request, error, "../console")
    answer = RedirectResponse(begun.address, _SEE_OTHER, headers=_NO_STORE)
    set_sign_in(request, answer, begun.cookie, SIGN_IN_FOR_S)
    return answer


@router.get(_CALLBACK)
async def finish_sign_in(request: Request, resources: ForPeople) -> Response:
    """Take the provider's answer, set the console's cookie, and show the console."""
    try:
        flow, redirect_uri = resources.required_provider().code_flow, _redirect_uri(request, resources)
        identity, state = await flow.finish(sign_in_of(request), request.query_params, redirect_uri)
        ticket = await resources.sign_ins.open_console(identity, state, resources.settings.oidc_session_s)
    except GraftworkError as error:
        return _failed(request, error, "../../console")
    answer = RedirectResponse("../../console", _SEE_OTHER, headers=_NO_STORE)
    clear_sign_in(request, answer)
    _set(request, answer, ticket, resources)
    return answer


@seat_router.put("/seat")
async def change_seat(body: SeatBody, request: Request, resources: ForPeople) -> JSONResponse:
    """Make the browser act as an operator, or in another tenant. The session keeps its end and its CSRF token."""
    person_id = request.state.principal.person_id
    if person_id is None:
        message = "This sign-in is that of a key, which is one tenant's or the operator's: sign in with another key."
        raise NotPermitted(message, code="not_a_person")
    tenant_id = None if body.tenant_id is None else TenantId(body.tenant_id)
    ticket = await resources.sign_ins.switch(person_id, presented_key(request), tenant_id)
    shown: dict[str, Any] = {"object": "console.seat", "tenant_id": tenant_id, "until": ticket.until}
    answer = JSONResponse(shown, headers=_NO_STORE)
    _set(request, answer, ticket, resources)
    return answer


def _set(request: Request, answer: Response, ticket: ConsoleTicket, resources: PeopleResources) -> None:
    set_ticket(request, answer, ticket.text, int(ticket.until - resources.clock.now()))


def _redirect_uri(request: Request, resources: PeopleResources) -> str:
    base = resources.settings.public_url or str(request.base_url).rstrip("/")
    return f"{base}{_CALLBACK}"


def _failed(request: Request, error: GraftworkError, console: str) -> Response:
    """Sends the browser to the console's page, which explains the code. The log has the reason, which holds no token."""
    _log.warning("sign_in_failed", extra={"code": error.code, "reason": error.message})
    person = error.details.get("person")
    query = {"sign_in": error.code} | ({"person": person} if isinstance(person, str) else {})
    answer = RedirectResponse(f"{console}?{urlencode(query)}", _SEE_OTHER, headers=_NO_STORE)
    clear_sign_in(request, answer)
    return answer
