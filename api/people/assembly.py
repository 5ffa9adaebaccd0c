"""Puts together what people sign in with, from the settings of a gateway."""

from graftwork.api.deps.people import PeopleResources, SignInProvider
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.oidc.code_flow import Client, CodeFlow
from graftwork.platform.oidc.id_tokens import IdTokens
from graftwork.platform.oidc.provider import Provider
from graftwork.platform.people.people import People
from graftwork.platform.people.roles import parse_group_roles
from graftwork.platform.people.sign_in import SignIns
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.tenancy import Tenancy


def people_resources(
    settings: Settings, database: Database, clock: Clock, pepper: bytes, tenancy: Tenancy
) -> PeopleResources:
    """Returns the services for people. Raises InvalidRequest for settings that do not go together."""
    people = People(database, clock, tenancy.changes, tenancy.work, parse_group_roles(settings.oidc_roles))
    tenancy.organisations.follow(people.settle_tenant)
    sign_ins = SignIns(database, clock, people, pepper)
    if settings.oidc_issuer is None:
        if settings.oidc_client_id is not None:
            raise InvalidRequest("oidc_client_id needs oidc_issuer: set both, or neither.", param="oidc_issuer")
        return PeopleResources(settings, clock, people, sign_ins)
    if settings.oidc_client_id is None:
        raise InvalidRequest("oidc_issuer needs oidc_client_id: set both, or neither.", param="oidc_client_id")
    provider = Provider(settings.oidc_issuer, clock)
    tokens = IdTokens(provider, clock, settings.oidc_groups_claim)
    client = Client(settings.oidc_client_id, settings.oidc_client_secret, settings.oidc_scopes)
    flow = CodeFlow(provider, tokens, client, clock, pepper)
    return PeopleResources(settings, clock, people, sign_ins, SignInProvider(flow, tokens))
