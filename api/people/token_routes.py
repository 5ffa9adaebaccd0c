"""Defines the routes by which the command line gets a person's tokens, and anybody asks who they are."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from graftwork.api.deps.resources import ForPeople, resources_of
from graftwork.api.deps.route_classes import AuthenticatedRoute, ConsoleRoute
from graftwork.api.http.request import client_address, presented_key
from graftwork.api.openapi.declare import also
from graftwork.api.people.views import TokensBody, tokens_answer, who_am_i
from graftwork.platform.answers import people as answers
from graftwork.platform.errors import NotFound
from graftwork.platform.oidc.id_tokens import Expected


class IdTokenRoute(AuthenticatedRoute):
    """A route that accepts an ID token of the identity provider, as a bearer token, instead of a key."""

    is_idempotent = False

    async def authenticate(self, request: Request) -> Any:
        """Returns the identity that the token proves. Raises NotAuthenticated for a token that is not right.

        Such a token counts as a wrong key of the client's address.
        """
        token = presented_key(request)
        people, gate = resources_of(request).people, resources_of(request).server.gate
        client_id = people.settings.oidc_cli_client_id
        provider = people.required_provider()
        if client_id is None:
            message = "This server offers no sign-in at the command line: its operator sets oidc_cli_client_id."
            raise NotFound(message, code="no_cli_sign_in")
        check = partial(provider.id_tokens.check, expected=Expected(client_id))
        return await gate.check_other(token, client_address(request), check)


router = APIRouter(prefix="/v1/auth", tags=["people"], route_class=IdTokenRoute)
identity_router = APIRouter(prefix="/v1/auth", tags=["people"], route_class=ConsoleRoute)


@router.post("/tokens", responses=also(404))
async def exchange_id_token(
    request: Request, resources: ForPeople, body: TokensBody | None = None
) -> answers.PersonTokens:
    """Exchange an ID token of the identity provider, sent as a bearer token, for tokens of this server.

    The tokens act as an operator, and in one tenant. They are short-lived, and each ID token works once: to go on, get a
    new ID token with the provider's refresh token.
    """
    identity, token = request.state.principal, presented_key(request)
    wanted = None if body is None else body.tenant
    signed_in = await resources.sign_ins.exchange(identity, token, wanted, resources.settings.oidc_token_s)
    return tokens_answer(signed_in)


@identity_router.get("/whoami")
async def get_whoami(request: Request, resources: ForPeople) -> answers.WhoAmI:
    """Tell who sends this request, as what, and as what else the person may act."""
    return await who_am_i(request.state.principal, resources)
