"""Tests of the sign-in of browsers with the identity provider, and of what people do in the console."""

import logging
from typing import Any

import httpx
import pytest

from graftwork.platform.keys.scopes import ALL_SCOPES
from graftwork.platform.oidc.code_flow import SIGN_IN_FOR_S
from tests.api.in_process_gateway import Gateway, TestTenant, chat
from tests.api.people.conftest import SignInDesk, failure
from tests.identity_provider import CLI, hmac_token, new_key, signed


async def test_a_person_signs_in_and_acts_in_the_tenant(desk: SignInDesk) -> None:
    """A browser comes back from the provider with a cookie that no script reads, and acts with the role's scopes."""
    tenant = await desk.gateway.tenant()
    person = await desk.person("ada", f"tenant-member:{tenant.id}")

    browser = await desk.sign_in("ada")

    session = (await browser.get("/console/session")).json()
    assert (session["role"], session["tenant"]["id"]) == ("tenant", tenant.id)
    assert session["person"] == {"id": person.id, "name": "ada@example.com"}
    assert session["tenant"]["scopes"] == ["inference", "read", "usage"]
    assert (await browser.post("/v1/chat/completions", json=chat())).status_code == 200
    assert (await browser.delete("/v1/adapters/none")).json()["error"]["code"] == "missing_scope"


async def test_the_cookies_are_out_of_reach(desk: SignInDesk) -> None:
    """Over TLS both cookies are bound to the host; the sign-in's is Lax, the session's Strict, and the first is cleared."""
    tenant = await desk.gateway.tenant()
    await desk.person("ada", f"tenant-viewer:{tenant.id}")
    browser = desk.browser("https://gateway.test")

    begun = await browser.get("/console/sign-in")
    back = await browser.get(desk.provider.authorize(begun.headers["location"]))

    (first,) = begun.headers.get_list("set-cookie")
    cleared, session = back.headers.get_list("set-cookie")
    assert first.startswith("__Host-graftwork_sign_in=")
    assert session.startswith("__Host-graftwork_console=gwc_gw_")
    for cookie, same_site in ((first, "lax"), (session, "strict")):
        assert {"HttpOnly", "Secure", "Path=/", f"SameSite={same_site}"} <= set(cookie.split("; "))
    assert "Max-Age=0" in cleared
    assert back.headers["cache-control"] == "no-store"


async def test_an_operator_acts_as_one_and_is_in_the_audit_log(desk: SignInDesk) -> None:
    """A person's act as an operator is in the audit log under the person's id, and shown with the name."""
    person = await desk.person("ada", "operator")
    browser = await desk.sign_in("ada")

    created = await browser.post("/v1/admin/tenants", json={"name": "made by Ada"})

    assert created.status_code == 201
    entries = (await browser.get("/v1/admin/audit")).json()["data"]
    acts = [(entry["action"], entry["actor"], entry["actor_name"]) for entry in entries]
    assert acts[0] == ("tenant.created", person.id, "ada@example.com")
    assert ("person.signed_in", person.id, "ada@example.com") in acts


async def test_a_reading_operator_changes_nothing(desk: SignInDesk) -> None:
    """Each of the operator's routes that changes something refuses a reading operator, and each list answers."""
    await desk.person("ada", "operator-readonly")
    browser = await desk.sign_in("ada")
    paths = desk.gateway.app.openapi()["paths"]
    admin = [(method.upper(), path) for path in paths if path.startswith("/v1/admin") for method in paths[path]]
    changing = [(method, path) for method, path in admin if method != "GET"]

    for method, path in changing:
        answer = await browser.request(method, path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only_role"), (method, path)

    assert len(changing) > 20
    for path in ("tenants", "people", "audit", "usage", "replicas", "modes", "organisations"):
        assert (await browser.get(f"/v1/admin/{path}")).status_code == 200


async def test_a_person_changes_seats(desk: SignInDesk) -> None:
    """A person with several roles acts as one thing at a time, in the same session, and nowhere without a role."""
    first, second, foreign = [await desk.gateway.tenant(name) for name in ("First", "Second", "Foreign")]
    await desk.person("ada", "operator", f"tenant-viewer:{first.id}", f"tenant-admin:{second.id}")
    browser = await desk.sign_in("ada")
    session = (await browser.get("/console/session")).json()
    assert (session["role"], session["operator_role"]) == ("admin", "operator")
    assert [(one["name"], one["role"]) for one in session["tenants"]] == [
        ("First", "tenant-viewer"),
        ("Second", "tenant-admin"),
    ]

    for tenant_id, scopes in ((first.id, 2), (second.id, len(ALL_SCOPES))):
        moved = await browser.put("/console/session/seat", json={"tenant_id": tenant_id})
        assert moved.status_code == 200, moved.text
        now = (await browser.get("/console/session")).json()
        assert (now["tenant"]["id"], len(now["tenant"]["scopes"])) == (tenant_id, scopes)
        assert now["csrf_token"] == session["csrf_token"]
        assert (await browser.get("/v1/admin/tenants")).status_code == 403
    refused = await browser.put("/console/session/seat", json={"tenant_id": foreign.id})
    unknown = await browser.put("/console/session/seat", json={"tenant_id": "ten_unknown"})
    back = await browser.put("/console/session/seat", json={"tenant_id": None})

    assert [answer.status_code for answer in (refused, unknown, back)] == [403, 403, 200]
    assert refused.json()["error"]["message"].replace(foreign.id, "") == unknown.json()["error"]["message"].replace(
        "ten_unknown", ""
    )
    assert (await browser.get("/v1/admin/tenants")).status_code == 200


async def test_a_change_of_seats_needs_the_token_against_forgery(desk: SignInDesk) -> None:
    """Without the token, or from another site, a person's session changes nothing."""
    tenant = await desk.gateway.tenant()
    await desk.person("ada", f"tenant-admin:{tenant.id}")
    browser = await desk.sign_in("ada")
    token = browser.headers.pop("x-graftwork-csrf")
    forged: list[dict[str, str]] = [
        {},
        {"x-graftwork-csrf": "0" * 64},
        {"x-graftwork-csrf": token, "origin": "https://evil.test"},
        {"x-graftwork-csrf": token, "sec-fetch-site": "cross-site"},
    ]

    for headers in forged:
        for method, path in (
            ("PUT", "/console/session/seat"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/console/session"),
        ):
            answer = await browser.request(method, path, json={"tenant_id": tenant.id}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) in ((403, "csrf_token"), (403, "other_origin"))


async def test_a_key_has_no_other_seat(gateway: Gateway, tenant: TestTenant) -> None:
    """The session of a key stays that of the key."""
    answer = await tenant.client.put("/console/session/seat", json={"tenant_id": None})

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_a_person")


async def test_an_answer_works_once_and_in_one_browser(desk: SignInDesk) -> None:
    """A used answer, one in another browser, and one that comes late sign nobody in."""
    await desk.person("ada", "operator")
    browser, stranger, late = desk.browser(), desk.browser(), desk.browser()
    begun = await browser.get("/console/sign-in")
    cookie = browser.cookies["graftwork_sign_in"]
    back = desk.provider.authorize(begun.headers["location"])
    await stranger.get("/console/sign-in")
    elsewhere = await stranger.get(back)
    first = await browser.get(back)
    again = await browser.get(back)
    browser.cookies.set("graftwork_sign_in", cookie)
    with_cookie = await browser.get(back)  # the provider refuses the code
    address = await desk.come_back(late, "ada")
    desk.gateway.clock.advance(SIGN_IN_FOR_S)
    too_late = await late.get(address)

    assert first.headers["location"] == "../../console"
    failures = [failure(answer) for answer in (elsewhere, again, with_cookie, too_late)]
    assert failures == ["sign_in_state", "sign_in_state", "sign_in_code", "sign_in_state"]
    for client in (stranger, late):
        assert (await client.get("/console/session")).status_code == 401


async def test_a_state_works_once_even_if_the_code_did_twice(desk: SignInDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a provider that takes a code twice, the second answer with the same state is refused by the gateway."""
    await desk.person("ada", "operator")
    browser = desk.browser()
    begun = await browser.get("/console/sign-in")
    cookie = browser.cookies["graftwork_sign_in"]
    back = desk.provider.authorize(begun.headers["location"])
    await browser.get(back)
    browser.cookies.set("graftwork_sign_in", cookie)
    desk.provider.accept_again(back)

    assert failure(await browser.get(back)) == "sign_in_used"


def _wrong_tokens(desk: SignInDesk) -> dict[str, Any]:
    provider = desk.provider
    return {
        "nonce": {"nonce": "another"},
        "audience": {"aud": CLI},
        "expired": {"exp": provider.now() - 61},
        "issuer": {"iss": "https://evil.test"},
        "none": lambda claims: signed({"alg": "none"}, claims, lambda _: b""),
        "HS256": lambda claims: hmac_token(claims, str(provider.key.jwk).encode(), provider.key.kid),
        "key": lambda claims: signed({"alg": "RS256", "kid": provider.key.kid}, claims, new_key(number=1).sign),
    }


async def test_a_wrong_id_token_signs_nobody_in(desk: SignInDesk, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of wrong token ends the sign-in at the console's page, and is logged without the token."""
    await desk.person("ada", "operator")
    caplog.set_level(logging.DEBUG)
    for kind, wrong in _wrong_tokens(desk).items():
        browser = desk.browser()
        desk.provider.claims = wrong if isinstance(wrong, dict) else {}
        desk.provider.make_token = None if isinstance(wrong, dict) else wrong
        answer = await browser.get(await desk.come_back(browser, "ada"))

        assert failure(answer) == "id_token_refused", kind
        assert (await browser.get("/console/session")).status_code == 401
    logged = " ".join(str(vars(record)) for record in caplog.records if record.name.startswith("graftwork"))
    assert "id_token_refused" in logged
    assert "eyJ" not in logged


async def test_new_keys_of_the_provider_are_taken(desk: SignInDesk) -> None:
    """A sign-in works after the provider has changed its keys."""
    await desk.person("ada", "operator")
    await desk.sign_in("ada")
    desk.provider.key = new_key("ES256")

    browser = await desk.sign_in("ada")

    assert (await browser.get("/v1/admin/tenants")).status_code == 200


async def test_who_has_no_role_is_told_so(desk: SignInDesk) -> None:
    """A stranger gets no session, and the page names the person for the operator. So does somebody suspended."""
    suspended = await desk.person("bob", "operator")
    await desk.gateway.resources.people.people.suspend(suspended.id)
    browser = desk.browser()
    stranger = await browser.get(await desk.come_back(browser, "eve"))
    refused = await browser.get(await desk.come_back(browser, "bob"))

    people = (await desk.gateway.admin.get("/v1/admin/people", params={"subject": "eve"})).json()["data"]
    assert (failure(stranger), failure(refused)) == ("no_role", "person_suspended")
    assert f"person={people[0]['id']}" in stranger.headers["location"]
    assert (await browser.get("/console/session")).status_code == 401


async def test_a_provider_that_is_away(desk: SignInDesk) -> None:
    """While the provider is away, a sign-in says so; keys and sessions go on."""
    tenant = await desk.gateway.tenant()
    desk.provider.is_away = True

    answer = await desk.browser().get("/console/sign-in")

    assert (failure(answer), answer.headers["location"][:10]) == ("oidc_provider_away", "../console")
    assert (await tenant.client.get("/v1/models")).status_code == 200


async def test_without_a_provider_only_keys_sign_in(gateway: Gateway) -> None:
    """A server without a provider offers none, and has neither the sign-in nor the exchange."""
    offered = await gateway.anonymous.get("/console/sign-in/provider")
    begun = await gateway.anonymous.get("/console/sign-in")
    exchanged = await gateway.client("an.id.token").post("/v1/auth/tokens")

    assert offered.json()["provider"] is None
    assert failure(begun) == "no_oidc_provider"
    assert exchanged.status_code == 404


async def test_a_sign_in_replaces_the_one_before(desk: SignInDesk) -> None:
    """A second person at the same browser acts as themselves, with another token against forgery; a sign-out ends it."""
    await desk.person("ada", "operator")
    tenant = await desk.gateway.tenant()
    await desk.person("bob", f"tenant-viewer:{tenant.id}")
    browser = await desk.sign_in("ada")
    before = (await browser.get("/console/session")).json()
    await browser.get(await desk.come_back(browser, "bob"))
    after = (await browser.get("/console/session")).json()

    left = await browser.delete("/console/session")

    assert (after["person"]["name"], left.status_code) == ("bob@example.com", 204)
    assert after["csrf_token"] != before["csrf_token"]
    assert (await browser.get("/console/session")).status_code == 401


async def test_the_provider_is_public(desk: SignInDesk) -> None:
    """Anybody learns with what people sign in, and nothing secret."""
    answer: httpx.Response = await desk.gateway.anonymous.get("/console/sign-in/provider")

    assert answer.json()["provider"] == {
        "name": "Example",
        "issuer": desk.provider.issuer,
        "cli_client_id": CLI,
        "scopes": ["openid", "email", "profile"],
    }
