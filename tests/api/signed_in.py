"""A client that has the web console's cookie instead of a key, as the console's page does."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from graftwork.platform.ids import TenantId
from graftwork.platform.people.person import Identity, Person
from graftwork.platform.people.roles import parse_grant
from tests.api.in_process_gateway import Gateway, TestTenant

CSRF = "x-graftwork-csrf"
COOKIE = "graftwork_console"
SENDERS = ("key", "cookie", "person")
"""How somebody of a tenant sends requests: with a key, with the console's cookie for the key, or signed in as a person."""


async def sign_in(client: httpx.AsyncClient) -> None:
    """Gives the client the cookie and the token that changes need, and takes its key away."""
    answer = await client.post("/console/session")
    assert answer.status_code == 201, answer.text
    del client.headers["authorization"]
    client.headers[CSRF] = answer.json()["csrf_token"]


@asynccontextmanager
async def signed_in(gateway: Gateway, key: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A new client that has signed in with the key."""
    async with gateway.client(key) as browser:
        await sign_in(browser)
        yield browser


async def sign_in_person(gateway: Gateway, client: httpx.AsyncClient, *roles: str) -> Person:
    """Gives the client the session of a new person with these roles, and takes its key away."""
    people = gateway.resources.people
    identity = Identity("https://login.test", secrets.token_hex(8))
    person = await people.people.add(identity.issuer, identity.subject, None)
    for role in roles:
        person = await people.people.grant(person.id, parse_grant(role))
    ticket = await people.sign_ins.open_console(identity, secrets.token_hex(8), 3600.0)
    client.headers.pop("authorization", None)
    client.cookies.set(COOKIE, ticket.text)
    client.headers[CSRF] = (await client.get("/console/session")).json()["csrf_token"]
    return person


async def token_of_person(gateway: Gateway, tenant_id: TenantId, role: str = "tenant-admin") -> str:
    """The token with which the command line of a new person with this role acts in the tenant."""
    people = gateway.resources.people
    identity = Identity("https://login.test", secrets.token_hex(8))
    person = await people.people.add(identity.issuer, identity.subject, None)
    await people.people.grant(person.id, parse_grant(f"{role}:{tenant_id}"))
    signed_in = await people.sign_ins.exchange(identity, secrets.token_hex(8), tenant_id, 86_400.0)
    assert signed_in.tenant is not None
    return signed_in.tenant.text


async def send_as(gateway: Gateway, tenant: TestTenant, sender: str) -> None:
    """Makes the tenant's client send as one of `SENDERS`."""
    if sender == "cookie":
        await sign_in(tenant.client)
    elif sender == "person":
        await sign_in_person(gateway, tenant.client, role_in(tenant.id))


def role_in(tenant_id: TenantId) -> str:
    """The strongest role in a tenant."""
    return f"tenant-admin:{tenant_id}"
