"""Tests of people who may not do everything: the console offers them nothing that the server refuses."""

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.people.office import Office
from tests.api.console.test_accessibility import EXAMPLES, pages_of
from tests.api.in_process_gateway import adapter_upload

HARMLESS = {
    "Load more",
    "Earlier",
    "Later",
    "Show its timeline",
    "Show earlier entries",
    "Download as CSV",
    "Download as JSON",
}
"""Buttons that only read."""
ACTS = {
    "people": {"Add a person"},
    "people/{person}": {"Grant a role", "Suspend", "Delete", "Take back Operator, read only"},
    "tenants": {"New tenant"},
    "tenants/{tenant}": {"Edit", "Suspend", "Delete", "New key", "Rotate first", "Revoke first", "Save limits"},
    "replicas": {"Drain engine-0"},
    "requests": {"Trace its requests", "Stop tracing {tenant}"},
    "prices": {"Set prices", "Change the prices of Acme"},
    "modes": {"Set modes"},
}
"""What those pages offer to an operator who may change something."""


def offered(browser: Browser, page: str) -> set[str]:
    """Goes to a page, and returns the names of the buttons that can be pressed there."""
    browser.driver.execute_script("document.querySelector('h1').remove(); location.hash = arguments[0]", f"#/{page}")
    heading = browser.find("h1").text
    assert heading not in ("Not found", "There is no such page", "This page cannot be shown"), page
    browser.wait(lambda: "Loading…" not in browser.text() or None)
    buttons = [one for one in browser.all("main button") if one.is_displayed() and one.is_enabled()]
    outside = [one for one in buttons if not browser.driver.execute_script("return arguments[0].closest('th')", one)]
    return {one.get_attribute("aria-label") or one.text for one in outside} - HARMLESS


def shown_things(office: Office) -> dict[str, str]:
    """What the pages show, with something to change on each. Returns the names for their addresses."""
    server = office.server
    tenant = server.tenant("Acme")
    admin = server.client(server.admin_key)
    rates = {"tenant_id": tenant.id, "currency": "USD", "rates": {"input": "1", "output": "2"}}
    admin.post("/v1/admin/prices", json=rates).raise_for_status()
    admin.put(f"/v1/admin/traces/{tenant.id}", json={"token_ids": False}).raise_for_status()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    answer = tenant.client.post("/v1/chat/completions", json=body).raise_for_status()
    shown = office.person(f"shown-to-{tenant.id}", "operator-readonly")
    return {"tenant": tenant.id, "person": shown, "request": answer.headers["x-request-id"], "month": "2026-01"}


def test_an_operator_who_only_reads_is_offered_no_act(browser: Browser, office: Office) -> None:
    """On every page of the operator a read-only role sees what is there and no button that the server would refuse.

    The same pages offer these acts to an operator who may change something.
    """
    things = shown_things(office)
    office.person("dora", "operator")
    office.person("vera", "operator-readonly")
    found = {}
    for subject in ("dora", "vera"):
        office.sign_in(browser, subject)
        browser.find("h1")
        for page in pages_of(browser, "admin"):
            found[subject, page] = offered(browser, page.format(**things))
            if (subject, page) == ("vera", "tenants/{tenant}"):
                assert not browser.field("Requests per minute").is_enabled()
    wanted = {page: {name.format(**things) for name in names} for page, names in ACTS.items()}

    assert {page: names - found["dora", page] for page, names in wanted.items()} == {page: set() for page in ACTS}
    assert {page: names for (subject, page), names in found.items() if subject == "vera" and names} == {}
    assert "Operator, read only" in browser.find("#who").text
    refused = browser.run("return (await fetch('v1/admin/tenants', {method: 'POST'})).status")
    assert refused == 403


def test_a_viewer_is_offered_no_act(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A key that reads sees adapters, sessions and their turns, with no button to change or run one."""
    tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=adapter_upload(1)).raise_for_status()
    session = tenant.client.post("/v1/sessions", json={"model": "pirate"}).json()["id"]
    answer = tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"}).raise_for_status()
    places = {"session": session, "request": answer.headers["x-request-id"], "month": "2026-01"}
    tenancy = server.resources.account.tenancy
    key = server.run(tenancy.create_key(tenant.id, "viewer", scopes=["read", "usage"]))[1]  # type: ignore[arg-type]
    own: dict[str, set[str]] = {}
    seen: dict[str, set[str]] = {}
    pages = ("sessions", EXAMPLES["tenant"][r"^sessions\/([^/]+)$"], "adapters", "adapters/name/pirate", "usage")
    for one, found in ((tenant.key, own), (key, seen)):
        browser.sign_in(server.url, one, "usage")
        for page in pages:
            found[page] = offered(browser, page.format(**places))
        if one == key:
            assert "Playground" not in [link.text for link in browser.all("#nav a")]

    assert {page: names for page, names in seen.items() if names} == {}
    assert {"New session"} <= own["sessions"]
    assert {"Send", "Fork", "Close"} <= own["sessions/{session}"]
    assert {"Delete", "Tags", "New alias"} <= own["adapters/name/pirate"]
