"""Tests of the web console's routes over HTTP: the cookie, forged requests, the policy of the page, ended keys."""

import re

import httpx
import pytest

from graftwork.api.console.files import console_files
from graftwork.platform.errors import NotAuthenticated
from graftwork.platform.keys.console_tickets import SESSION_FOR_S, TICKET_FOR_S
from graftwork.platform.tenancy.tenancy import Tenancy
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, TestTenant, chat
from tests.api.signed_in import CSRF, signed_in

COOKIE = "graftwork_console"


async def test_a_browser_signs_in_with_a_tenants_key(gateway: Gateway, tenant: TestTenant) -> None:
    """The cookie is out of reach of scripts and other sites, and holds no part of the key's secret."""
    answer = await tenant.client.post("/console/session")

    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={TICKET_FOR_S}"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert tenant.key.split("_")[2] not in cookie
    assert answer.json()["tenant"]["id"] == tenant.id
    assert cookie.split("=")[1].split(";")[0] not in answer.text


async def test_over_tls_the_cookie_is_bound_to_the_host(gateway: Gateway, tenant: TestTenant) -> None:
    """Over TLS the cookie is secure, and has the prefix that binds it to this host."""
    transport = httpx.ASGITransport(app=gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="https://gateway.test") as browser:
        answer = await browser.post("/console/session", headers={"authorization": f"Bearer {tenant.key}"})
        known = await browser.get("/console/session")

    assert answer.headers["set-cookie"].startswith(f"__Host-{COOKIE}=")
    assert "Secure" in answer.headers["set-cookie"]
    assert known.json()["role"] == "tenant"


@pytest.mark.parametrize("key", ["", "gw_wrong", "gwa_operator_wrong"])
async def test_a_wrong_key_gets_no_cookie(gateway: Gateway, key: str) -> None:
    """A sign-in with a wrong key is a 401 without a cookie."""
    answer = await gateway.anonymous.post("/console/session", headers={"authorization": f"Bearer {key}"})

    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


async def test_the_cookie_sees_what_its_key_sees(gateway: Gateway, tenant: TestTenant) -> None:
    """A tenant's cookie opens the tenant's routes and no route of the operator; the admin's cookie, the reverse."""
    async with signed_in(gateway, tenant.key) as browser:
        assert (await browser.get("/v1/sessions")).status_code == 200
        assert (await browser.get("/v1/admin/tenants")).status_code == 403
        assert (await browser.get("/metrics")).status_code == 403
    async with signed_in(gateway, ADMIN_KEY) as browser:
        assert (await browser.get("/v1/admin/tenants")).status_code == 200
        assert (await browser.get("/v1/sessions")).status_code == 403
        assert (await browser.get("/console/session")).json()["role"] == "admin"


async def test_a_key_without_a_scope_gets_no_more_by_cookie(gateway: Gateway, tenant: TestTenant) -> None:
    """The scopes of the key hold for its cookie."""
    _, key = await gateway.resources.account.tenancy.create_key(tenant.id, "usage", scopes=["usage"])
    async with signed_in(gateway, key) as browser:
        assert (await browser.get("/v1/usage")).status_code == 200
        refused = await browser.post("/v1/chat/completions", json=chat())

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")


async def test_changes_need_the_token_of_the_sign_in(gateway: Gateway, tenant: TestTenant) -> None:
    """A state-changing request by cookie without the token, or with another sign-in's, is refused; reads need none."""
    async with signed_in(gateway, tenant.key) as browser, signed_in(gateway, tenant.key) as other:
        foreign = other.headers[CSRF]
        del browser.headers[CSRF]
        read = await browser.get("/v1/sessions")
        answers = [
            await browser.post("/v1/sessions", json={"model": "tiny"}, headers={CSRF.encode(): token})
            for token in (b"", foreign.encode(), "é".encode(), b"0" * 64)
        ]

    assert read.status_code == 200
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(403, "csrf_token")] * 4


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://gateway.test:8080"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_pages_of_other_origins_get_nothing(
    gateway: Gateway, tenant: TestTenant, headers: dict[str, str]
) -> None:
    """A request that a page of another origin has sent is refused, also with the right token, and also a read."""
    async with signed_in(gateway, tenant.key) as browser:
        for answer in (
            await browser.get("/v1/sessions", headers=headers),
            await browser.post("/v1/sessions", json={"model": "tiny"}, headers=headers),
            await browser.post("/console/session", headers=headers),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "other_origin")
    assert (await tenant.client.get("/v1/sessions", headers=headers)).status_code == 200  # a key is no cookie


async def test_the_own_origin_is_let_in(gateway: Gateway, tenant: TestTenant) -> None:
    """The console's own requests name its origin, and are served, also behind a proxy that ends TLS."""
    async with signed_in(gateway, tenant.key) as browser:
        for origin in ("http://gateway.test", "https://gateway.test"):
            headers = {"origin": origin, "sec-fetch-site": "same-origin"}
            answer = await browser.post("/v1/sessions", json={"model": "tiny"}, headers=headers)

            assert answer.status_code == 201


async def test_a_revoked_key_ends_its_cookie_at_once(gateway: Gateway, tenant: TestTenant) -> None:
    """After a revocation, a rotation or a suspension the cookie opens nothing; another key's cookie still does."""
    tenancy = gateway.resources.account.tenancy
    for act, status in (("revoke", 401), ("rotate", 401), ("suspend", 403)):
        other = await gateway.tenant("Other")
        key, plaintext = await tenancy.create_key(other.id, "second")
        async with signed_in(gateway, plaintext) as browser, signed_in(gateway, tenant.key) as neighbour:
            if act == "revoke":
                await tenancy.revoke_key(other.id, key.id)
            elif act == "rotate":
                await tenancy.rotate_key(other.id, key.id)
            else:
                await tenancy.suspend_tenant(other.id)

            assert (await browser.get("/v1/sessions")).status_code == status, act
            assert (await browser.post("/console/session")).status_code == status, act
            assert (await neighbour.get("/v1/sessions")).status_code == 200


async def test_a_cookie_ends_with_its_key_and_with_its_own_time(gateway: Gateway, tenant: TestTenant) -> None:
    """A key that expires ends its cookie. A cookie that is not renewed ends by itself, and says so."""
    now = gateway.clock.now()
    _, brief = await gateway.resources.account.tenancy.create_key(tenant.id, "brief", expires_at=now + 60)
    async with signed_in(gateway, brief) as browser, signed_in(gateway, tenant.key) as other:
        gateway.clock.advance(61)
        assert (await browser.get("/v1/sessions")).json()["error"]["code"] == "expired_api_key"
        assert (await other.get("/v1/sessions")).status_code == 200
        gateway.clock.advance(TICKET_FOR_S)
        ended = await other.get("/v1/sessions")

    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "console_session_expired")


async def test_renewal_keeps_the_token_and_ends_after_half_a_day(gateway: Gateway, tenant: TestTenant) -> None:
    """A renewed cookie lasts on, its token stays the same for other tabs, and nothing renews it beyond twelve hours."""
    async with signed_in(gateway, tenant.key) as browser:
        token, renewals = browser.headers[CSRF], 0
        while (renewed := await browser.post("/console/session")).status_code == 201:
            assert renewed.json()["csrf_token"] == token
            gateway.clock.advance(TICKET_FOR_S - 60)
            renewals += 1

    assert (SESSION_FOR_S / TICKET_FOR_S) <= renewals <= SESSION_FOR_S / TICKET_FOR_S + 2


async def test_ended_cookies_do_not_count_as_wrong_keys(gateway: Gateway, tenant: TestTenant) -> None:
    """A page that is left open does not slow down new keys from its address."""
    async with signed_in(gateway, tenant.key) as browser, signed_in(gateway, ADMIN_KEY) as admin:
        gateway.clock.advance(TICKET_FOR_S)
        for _ in range(50):
            assert (await browser.get("/v1/sessions")).status_code == 401
            assert (await admin.get("/v1/admin/tenants")).status_code == 401
    new = await gateway.tenant("New")

    assert (await new.client.get("/v1/sessions")).status_code == 200


@pytest.mark.parametrize("part", range(2, 7))
async def test_a_changed_cookie_is_refused(gateway: Gateway, tenant: TestTenant, part: int) -> None:
    """Whoever changes a part of a cookie, such as its key or its time, gets a 401."""
    async with signed_in(gateway, tenant.key) as browser:
        parts = (browser.cookies.get(COOKIE) or "").split("_")
    parts[part] = parts[part][:-1] + ("1" if parts[part][-1] != "1" else "2")

    answer = await gateway.anonymous.get("/v1/sessions", headers={"cookie": f"{COOKIE}={'_'.join(parts)}"})

    assert answer.status_code == 401


async def test_a_tenants_cookie_cannot_become_the_admins(gateway: Gateway, tenant: TestTenant) -> None:
    """A tenant's cookie that says `gwa` is refused."""
    async with signed_in(gateway, tenant.key) as browser:
        forged = (browser.cookies.get(COOKIE) or "").replace("gwc_gw_", "gwc_gwa_")

    answer = await gateway.anonymous.get("/v1/admin/tenants", headers={"cookie": f"{COOKIE}={forged}"})

    assert answer.status_code == 401


async def test_signing_out_clears_the_cookie(gateway: Gateway, tenant: TestTenant) -> None:
    """A sign-out makes the browser forget the cookie, also when its key is no longer valid."""
    async with signed_in(gateway, tenant.key) as browser:
        answer = await browser.delete("/console/session")

        assert answer.status_code == 204
        assert "Max-Age=0" in answer.headers["set-cookie"]
        assert (await browser.get("/console/session")).status_code == 401


async def test_the_page_loads_only_from_its_own_origin(gateway: Gateway) -> None:
    """The page has a strict policy, no script or style of its own in it, and names no other address."""
    answer = await gateway.anonymous.get("/console")

    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"<style|\son\w+=|style=|https?://|<script(?![^>]*src=)", answer.text)
    linked = re.findall(r'(?:src|href)="(console/[^"]+)"', answer.text)
    assert len(linked) > 10
    for path in linked:
        found = await gateway.anonymous.get(f"/{path}")
        assert found.status_code == 200
        assert "immutable" in found.headers["cache-control"]


def test_no_file_names_another_address_or_parses_markup() -> None:
    """No script fetches from elsewhere, and none turns a text into markup or code."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser|@import"
    )
    for name, file in console_files().by_name.items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")

        assert not forbidden.search(text), name
        assert not re.search(r"https?://|url\(", text), name


@pytest.mark.parametrize("name", ["../files.py", "..%2f..%2ffiles.py", "index.html", "nothing.js", "pages/"])
async def test_only_the_consoles_files_are_served(gateway: Gateway, name: str) -> None:
    """No address leads to another file."""
    answer = await gateway.anonymous.get(f"/console/static/{console_files().version}/{name}")

    assert answer.status_code == 404


@pytest.mark.parametrize(("pepper", "is_taken"), [(b"a pepper for tests", True), (b"another pepper", False)])
async def test_gateways_with_one_pepper_share_cookies(
    gateway: Gateway, tenant: TestTenant, pepper: bytes, is_taken: bool
) -> None:
    """A gateway with the same pepper and database takes a cookie that another one has made."""
    async with signed_in(gateway, tenant.key) as browser:
        ticket = browser.cookies.get(COOKIE) or ""
    peer = Tenancy(gateway.resources.server.database, pepper, gateway.clock)

    if is_taken:
        assert (await peer.authenticate(ticket)).tenant_id == tenant.id
    else:
        with pytest.raises(NotAuthenticated):
            await peer.authenticate(ticket)
