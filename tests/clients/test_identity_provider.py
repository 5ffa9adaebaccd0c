"""Tests of both sign-ins against `oidc-provider` of the npm registry: a browser's, and the command line's."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from graftwork import Graftwork
from graftwork.api.sdk.login.device_flow import DeviceCode, LoginError
from graftwork.api.sdk.login.login import Logins, SignInOffer
from graftwork.api.sdk.login.login_file import LoginFile
from graftwork.platform.clock import SystemClock
from graftwork.platform.oidc.provider import RETRY_S
from graftwork.platform.people.roles import parse_grant
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway, write_model_folder
from tests.clients.identity_provider_process import ProviderProcess, identity_provider, walk

PUBLIC_URL = "http://127.0.0.1:9"
CALLBACK = f"{PUBLIC_URL}/console/sign-in/callback"


@dataclass
class SignIn:
    """A gateway, its address, and the provider with which its people sign in."""

    gateway: Gateway
    url: str
    provider: ProviderProcess

    async def person(self, subject: str, *roles: str) -> None:
        people = self.gateway.resources.people.people
        person = await people.add(self.provider.issuer, subject, None)
        for role in roles:
            await people.grant(person.id, parse_grant(role))

    async def browse(self, subject: str, *, refuse: bool = False) -> httpx.AsyncClient:
        """A browser that has been at the provider and back, in which a person has signed in or refused to."""
        browser = httpx.AsyncClient(base_url=self.url)
        begun = await browser.get("/console/sign-in")
        with httpx.Client() as pages:
            back = await asyncio.to_thread(walk, pages, begun.headers["location"], subject, CALLBACK, refuse=refuse)
        self.answer = await browser.get(back.removeprefix(PUBLIC_URL))
        return browser


@pytest.fixture
async def sign_in(tmp_path: Path, sqlite_template: Path) -> AsyncIterator[SignIn]:
    data, pages = tmp_path / "data", tmp_path / "provider"
    for folder in (data, pages):
        folder.mkdir()
    shutil.copy(sqlite_template, data / "graftwork.db")
    async with identity_provider(pages, CALLBACK) as provider:
        settings = replace(
            gateway_settings(data, write_model_folder(tmp_path / "tiny")),
            oidc_issuer=provider.issuer,
            oidc_client_id="console",
            oidc_client_secret="a secret of the console & more",
            oidc_cli_client_id="cli",
            oidc_roles=(("bobs", "operator-readonly"),),
            public_url=PUBLIC_URL,
        )
        async with open_gateway(settings) as gateway, gateway_on_port(gateway) as url:
            gateway.clock.advance(SystemClock().now() - gateway.clock.now())
            yield SignIn(gateway, url, provider)


async def test_a_browser_signs_in(sign_in: SignIn) -> None:
    """A person signs in with code and PKCE, acts by a granted role, and another by a group of the provider."""
    tenant = await sign_in.gateway.tenant()
    await sign_in.person("ada", f"tenant-member:{tenant.id}")

    ada = await sign_in.browse("ada")
    bob = await sign_in.browse("bob")

    session = (await ada.get("/console/session")).json()
    assert (session["tenant"]["id"], session["person"]["name"]) == (tenant.id, "ada@example.com")
    assert (await bob.get("/console/session")).json()["operator_role"] == "operator-readonly"
    for browser in (ada, bob):
        await browser.aclose()


async def test_a_browser_that_refuses(sign_in: SignIn) -> None:
    """A person who does not agree comes back without a session."""
    async with aclosing(await sign_in.browse("ada", refuse=True)) as browser:
        assert sign_in.answer.headers["location"] == "../../console?sign_in=sign_in_denied"
        assert (await browser.get("/console/session")).status_code == 401


async def test_rotated_keys(sign_in: SignIn) -> None:
    """After the provider has changed its keys, people sign in as before."""
    await sign_in.person("ada", "operator")
    async with aclosing(await sign_in.browse("ada")) as before:
        assert (await before.get("/v1/admin/tenants")).status_code == 200
    await sign_in.provider.rotate()
    sign_in.gateway.clock.advance(RETRY_S)

    async with aclosing(await sign_in.browse("ada")) as after:
        assert (await after.get("/v1/admin/tenants")).status_code == 200


async def test_the_command_line_signs_in_and_renews(sign_in: SignIn, tmp_path: Path) -> None:
    """The device flow waits for the person, gives tokens for both kinds of routes, and renews them when they end."""
    tenant = await sign_in.gateway.tenant("Acme")
    await sign_in.person("ada", "operator", f"tenant-admin:{tenant.id}")
    file, now, waits = LoginFile(tmp_path / "logins.json"), sign_in.gateway.clock.now(), list[float]()
    codes: list[DeviceCode] = []

    def wait(seconds: float) -> None:
        """The person agrees while the command line waits for the second time."""
        waits.append(seconds)
        if len(waits) == 2:
            with httpx.Client() as pages:
                page = walk(pages, codes[0].verification_uri_complete or "", "ada", "never:")
            assert "Sign-in Success" in page

    def show(_: SignInOffer, code: DeviceCode) -> None:
        codes.append(code)

    logins = Logins(file, sleep=wait, now=lambda: now)
    tokens = await asyncio.to_thread(logins.sign_in, sign_in.url, "Acme", show)
    first = file.find(sign_in.url)
    later = Logins(file, now=lambda: now + 900)
    renewed = await asyncio.to_thread(later.token, sign_in.url, admin=True)
    second = file.find(sign_in.url)

    assert waits == [5.0, 5.0]
    assert (tokens.person.subject, tokens.tenant_id) == ("ada", tenant.id)
    assert first is not None
    assert second is not None
    assert renewed == second.operator_token != first.operator_token
    assert second.refresh_token is not None
    with Graftwork(sign_in.url, api_key=second.tenant_token, admin_key=second.operator_token) as client:
        shown = await asyncio.to_thread(client.auth.whoami)
        people = await asyncio.to_thread(client.admin.people.list)
    assert (shown.tenant_id, [person.subject for person in people]) == (tenant.id, ["ada"])


async def test_the_command_line_of_somebody_who_refuses(sign_in: SignIn, tmp_path: Path) -> None:
    """A person who does not agree is not signed in at the command line, and nothing is stored."""

    def show(_: SignInOffer, code: DeviceCode) -> None:
        with httpx.Client() as pages:
            walk(pages, code.verification_uri_complete or "", "ada", "never:", refuse=True)

    file = LoginFile(tmp_path / "logins.json")
    with pytest.raises(LoginError) as caught:
        await asyncio.to_thread(Logins(file, sleep=lambda _: None).sign_in, sign_in.url, None, show)

    assert caught.value.code == "access_denied"
    assert file.find(sign_in.url) is None


async def test_a_stranger_at_the_command_line(sign_in: SignIn, tmp_path: Path) -> None:
    """Somebody without a role has signed in at the provider, and gets no token of the server."""

    def show(_: SignInOffer, code: DeviceCode) -> None:
        with httpx.Client() as pages:
            walk(pages, code.verification_uri_complete or "", "eve", "never:")

    logins = Logins(LoginFile(tmp_path / "logins.json"), sleep=lambda _: None)
    with pytest.raises(LoginError) as caught:
        await asyncio.to_thread(logins.sign_in, sign_in.url, None, show)

    assert "has no role here" in caught.value.message
