"""A gateway whose people sign in with a provider of this machine, and browsers for it."""

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.platform.clock import ManualClock
from graftwork.platform.people.person import Person
from graftwork.platform.people.roles import parse_grant
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway
from tests.identity_provider import CLI, CONSOLE, IdentityProvider, listening_provider

NOW = ManualClock().now()
"""The time of a gateway in process, which its provider shares."""


@dataclass
class SignInDesk:
    """A gateway with its provider, and how people get in."""

    gateway: Gateway
    provider: IdentityProvider
    browsers: list[httpx.AsyncClient] = field(default_factory=list)

    async def person(self, subject: str, *roles: str) -> Person:
        """A person with these roles, who has not signed in yet."""
        people = self.gateway.resources.people.people
        person = await people.add(self.provider.issuer, subject, None)
        for role in roles:
            person = await people.grant(person.id, parse_grant(role))
        return person

    def browser(self, base_url: str = "http://gateway.test") -> httpx.AsyncClient:
        """A browser that has signed in nowhere. It follows no redirect by itself."""
        transport = httpx.ASGITransport(app=self.gateway.app)
        client = httpx.AsyncClient(transport=transport, base_url=base_url)
        self.browsers.append(client)
        return client

    async def come_back(self, browser: httpx.AsyncClient, subject: str) -> str:
        """The address with which the provider sends a browser back that has begun to sign in."""
        begun = await browser.get("/console/sign-in")
        assert begun.status_code == 303, begun.text
        self.provider.subject = subject
        return self.provider.authorize(begun.headers["location"])

    async def sign_in(self, subject: str, base_url: str = "http://gateway.test") -> httpx.AsyncClient:
        """A browser that has signed in, with the token that changes need."""
        browser = self.browser(base_url)
        back = await browser.get(await self.come_back(browser, subject))
        assert (back.status_code, back.headers["location"]) == (303, "../../console"), back.headers
        session = await browser.get("/console/session")
        assert session.status_code == 200, session.text
        browser.headers["x-graftwork-csrf"] = session.json()["csrf_token"]
        return browser

    async def exchange(self, subject: str, tenant: str | None = None) -> httpx.Response:
        """What a command line gets for a person's ID token."""
        self.provider.subject = subject
        body = {} if tenant is None else {"tenant": tenant}
        headers = {"authorization": f"Bearer {self.provider.token(CLI)}"}
        return await self.gateway.anonymous.post("/v1/auth/tokens", json=body, headers=headers)


def failure(answer: httpx.Response) -> str:
    """The code with which a sign-in has failed, as the console's page reads it."""
    assert answer.status_code == 303
    return dict(parse_qsl(urlsplit(answer.headers["location"]).query))["sign_in"]


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with listening_provider(lambda: NOW) as provider:
        yield provider


@pytest.fixture
async def desk(
    tmp_path: Path, tiny_model: Path, sqlite_template: Path, inspector: AdapterInspector, provider: IdentityProvider
) -> AsyncIterator[SignInDesk]:
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    settings = replace(
        gateway_settings(tmp_path, tiny_model),
        oidc_issuer=provider.issuer,
        oidc_client_id=CONSOLE,
        oidc_cli_client_id=CLI,
        oidc_name="Example",
    )
    async with open_gateway(settings, inspector) as gateway:
        provider.now = gateway.clock.now
        desk = SignInDesk(gateway, provider)
        yield desk
        for browser in desk.browsers:
            await browser.aclose()
