"""Tests of the operator's pages: tenants, keys, limits, engines, audit, modes, overview."""

import httpx

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant


def status_of(server: ConsoleServer, key: str) -> int:
    return server.client(key).get("/v1/models").status_code


def test_a_tenant_is_created_with_a_key_that_is_shown_once(browser: Browser, server: ConsoleServer) -> None:
    """The dialog shows the new key, which works; afterwards the page shows only its beginning."""
    browser.sign_in(server.url, server.admin_key, "tenants")
    browser.press("New tenant")
    browser.fill("Name", "Made in the browser")
    browser.press("Create tenant")
    key = browser.find("#secret").text
    browser.press("I have stored it")
    browser.press("Made in the browser")
    browser.heading("Made in the browser")
    browser.with_text("td", key.split("_")[1])

    assert status_of(server, key) == 200
    assert key not in browser.driver.page_source


def test_a_tenant_is_suspended_and_resumed(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """After a suspension the tenant's key is refused, after a resumption it works."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("Suspend")
    browser.press("Suspend")
    browser.with_text(".page-head .chip", "suspended")
    assert status_of(server, tenant.key) == 403
    browser.press("Resume")
    browser.with_text(".page-head .chip", "active")

    assert status_of(server, tenant.key) == 200


def test_limits_are_set_and_removed(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A limit that is typed is in force, and an empty field removes it."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.fill("Requests per minute", "60")
    browser.press("Save limits")
    browser.with_text("[role=status]", "Saved")
    assert tenant.client.get("/v1/quota").json()["requests_per_minute"] == 60
    browser.field("Requests per minute").clear()
    browser.press("Save limits")
    browser.wait(lambda: tenant.client.get("/v1/quota").json()["requests_per_minute"] is None)


def test_a_budget_is_set_and_kept(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A budget is typed as text, and saving another limit keeps it."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.fill("Budget per month", "100.50")
    browser.fill("Currency of budgets", "USD")
    browser.press("Save limits")
    browser.wait(lambda: tenant.client.get("/v1/quota").json()["monthly_budget"] == "100.5")
    browser.fill("Requests per minute", "60")
    browser.press("Save limits")
    browser.wait(lambda: tenant.client.get("/v1/quota").json()["requests_per_minute"] == 60)
    assert tenant.client.get("/v1/quota").json()["currency"] == "USD"


def test_keys_are_rotated_and_revoked(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A rotation shows a new key and ends the old one; a revocation ends the new one."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("Rotate first")
    browser.press("Rotate")
    fresh = browser.find("#secret").text
    browser.press("I have stored it")
    assert (status_of(server, tenant.key), status_of(server, fresh)) == (401, 200)
    browser.press("Revoke first")
    browser.press("Revoke")
    browser.with_text("td .chip", "revoked")

    assert status_of(server, fresh) == 401


def test_a_key_with_less_is_made(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A key that may only read usage is refused elsewhere."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("New key")
    browser.fill("Name", "reader")
    for label in ("Inference and sessions", "Read sessions", "Change adapters"):
        browser.field(label).click()
    browser.press("Create key")
    key = browser.find("#secret").text
    browser.press("I have stored it")
    client = server.client(key)

    assert client.get("/v1/usage").status_code == 200
    assert client.get("/v1/sessions").status_code == 403


def test_an_old_key_works_on_for_the_chosen_time(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant
) -> None:
    """A rotation with an overlap leaves the old key valid, and the list says until when."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("Rotate first")
    browser.field("The old key stays valid for").send_keys("a day")
    browser.press("Rotate")
    fresh = browser.find("#secret").text
    browser.press("I have stored it")
    browser.with_text("td", "until")

    assert (status_of(server, tenant.key), status_of(server, fresh)) == (200, 200)


def test_a_key_is_bound_to_models_and_networks(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A key that is made for one model and one network is refused elsewhere; a network that is none is refused."""
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("New key")
    browser.fill("Name", "bound")
    browser.fill("Models", "pirate, terse")
    browser.fill("Networks", "the office")
    browser.press("Create key")
    browser.with_text("dialog .error", "allowed_ips")
    browser.fill("Networks", "127.0.0.0/8")
    browser.press("Create key")
    near = browser.find("#secret").text
    browser.press("I have stored it")
    browser.with_text("td", "models: pirate, terse")
    browser.press("New key")
    browser.fill("Name", "far")
    browser.fill("Networks", "192.0.2.0/24, 2001:db8::/32")
    browser.press("Create key")
    far = browser.find("#secret").text
    browser.press("I have stored it")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}

    assert (status_of(server, near), status_of(server, far)) == (200, 403)
    assert server.client(near).post("/v1/chat/completions", json=chat).status_code in (403, 404)


def test_a_tenant_is_edited_and_deleted(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A new name is shown as text, however hostile; deleting asks for the name, and ends the tenant."""
    httpx.patch(
        f"{server.url}/v1/admin/tenants/{tenant.id}",
        json={"name": "<script>alert(1)</script>"},
        headers={"authorization": f"Bearer {server.admin_key}"},
        trust_env=False,
    ).raise_for_status()
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.heading("<script>alert(1)</script>")
    browser.press("Edit")
    browser.fill("Name", "Calm again")
    browser.press("Save")
    browser.heading("Calm again")
    browser.press("Delete")
    browser.fill("Type the name to go on", "Something else")
    browser.press("Delete for ever")
    browser.with_text("dialog .error", "not the name")
    browser.fill("Type the name to go on", "Calm again")
    browser.press("Delete for ever")
    browser.heading("Tenants")

    assert status_of(server, tenant.key) in (401, 403)


def test_the_filter_finds_tenants_that_are_not_loaded(browser: Browser, server: ConsoleServer) -> None:
    """The list loads a page; a search looks further until it finds the name."""
    server.tenant("Oldest needle")
    for number in range(60):
        server.run(server.resources.account.tenancy.create_tenant(f"Hay {number}"))
    browser.sign_in(server.url, server.admin_key, "tenants")
    assert "Oldest needle" not in browser.text()
    browser.find("input[type=search]").send_keys("needle")

    assert browser.with_text("tbody th", "Oldest needle")


def test_engines_are_shown_and_the_only_one_is_not_drained(browser: Browser, server: ConsoleServer) -> None:
    """The engine's load is shown. The server refuses to drain its only engine, and the dialog says why."""
    browser.sign_in(server.url, server.admin_key, "replicas")
    browser.with_text(".card", "Running")
    browser.find(".card button").click()
    browser.press("Drain")

    assert browser.find("dialog .error").text


def test_audit_and_modes(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A mode that is set is in force for the gateway, and the audit names the change."""
    browser.sign_in(server.url, server.admin_key, "modes")
    browser.fill("Most tokens of one answer", "256")
    browser.press("Set modes")
    browser.with_text("[role=status]", "In force")
    admin = server.client(server.admin_key)
    assert admin.get("/v1/admin/modes").json()["max_output_tokens"] == 256
    browser.field("Most tokens of one answer").clear()
    browser.press("Set modes")
    browser.wait(lambda: admin.get("/v1/admin/modes").json()["max_output_tokens"] is None)
    browser.go("audit", "Audit")

    assert browser.with_text("tbody th", "modes")


def test_a_tenant_is_traced(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The operator switches the traces of a tenant on and off; an id that is none is refused, and stays typed."""
    browser.sign_in(server.url, server.admin_key, "requests")
    browser.fill("Id of a tenant or a session", "somebody")
    browser.press("Trace its requests")
    browser.find(".card .error")
    assert browser.field("Id of a tenant or a session").get_property("value") == "somebody"
    browser.fill("Id of a tenant or a session", tenant.id)
    browser.press("Trace its requests")
    browser.with_text("tbody tr", tenant.id)
    admin = server.client(server.admin_key)
    assert [one["id"] for one in admin.get("/v1/admin/traces").json()["data"]] == [tenant.id]
    browser.press(f"Stop tracing {tenant.id}")
    browser.press("Stop tracing")
    browser.with_text(".card", "Nobody's requests are traced")

    assert admin.get("/v1/admin/traces").json()["data"] == []


def test_the_overview_names_who_is_refused(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A tenant whose requests are refused stands under “Who suffers”, with the reason."""
    server.client(server.admin_key).put(
        f"/v1/admin/tenants/{tenant.id}/quota", json={"requests_per_minute": 1}
    ).raise_for_status()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    codes = [tenant.client.post("/v1/chat/completions", json=body).status_code for _ in range(5)]
    assert 429 in codes
    browser.sign_in(server.url, server.admin_key)
    browser.with_text(".worst li", "refused")
    browser.go(f"tenants/{tenant.id}", "Acme")
    browser.with_text(".worst li", "refused")
    browser.go("", "Overview")
    browser.with_text(".tile", "Engines ready")


def test_lists_of_the_fleet(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The operator sees live sessions, and a hostile tenant name is text."""
    session = tenant.client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]
    tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"}).raise_for_status()
    browser.sign_in(server.url, server.admin_key, "sessions")
    browser.with_text("tbody th", session)
    browser.go("adapters", "Adapters")
    browser.go("usage", "Usage")

    assert browser.with_text("caption", "Tokens and requests")
