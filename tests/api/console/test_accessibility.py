"""Tests of what people with a screen reader, a keyboard or a phone get, by axe-core's rules."""

from datetime import UTC, datetime
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from graftwork.platform.people.roles import parse_grant
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.ledger import record_days, set_prices
from tests.api.in_process_gateway import adapter_upload
from tests.clients.environments import node_packages

EXAMPLES = {
    "admin": {
        r"^requests\/([^/]+)$": "requests/{request}",
        r"^tenants\/([^/]+)$": "tenants/{tenant}",
        r"^people\/([^/]+)$": "people/{person}",
        r"^invoices\/([^/]+)$": "invoices/{tenant}",
        r"^invoices\/([^/]+)\/([^/]+)$": "invoices/{tenant}/{month}",
    },
    "tenant": {
        r"^requests\/([^/]+)$": "requests/{request}",
        r"^invoices\/([^/]+)$": "invoices/{month}",
        r"^adapters\/name\/([^/]+)$": "adapters/name/pirate",
        r"^sessions\/([^/]+)$": "sessions/{session}",
    },
    "tenant-admin": {},
}
"""An address for each route of the console that has parameters."""
DIALOGS = {
    "admin": (
        ("tenants", "New tenant"),
        ("tenants/{tenant}", "Edit"),
        ("tenants/{tenant}", "New key"),
        ("tenants/{tenant}", "Rotate first"),
        ("tenants/{tenant}", "Set prices"),
        ("tenants/{tenant}", "Delete"),
        ("people", "Add a person"),
        ("people/{person}", "Grant a role"),
        ("people/{person}", "Take back Operator"),
        ("people/{person}", "Delete"),
        ("prices", "Set prices"),
        ("replicas", "Drain engine-0"),
        ("", "Keyboard shortcuts"),
    ),
    "tenant": (
        ("adapters/name/pirate", "New alias"),
        ("adapters/name/pirate", "Change prod"),
        ("adapters/name/pirate", "History of prod"),
        ("adapters/name/pirate", "Start a roll-out"),
        ("adapters/name/pirate", "Tags"),
        ("adapters/name/pirate", "Change defaults"),
        ("sessions", "New session"),
    ),
    "tenant-admin": (("keys", "New key"), ("keys", "Rotate first"), ("keys", "Revoke first")),
}
SIZES = pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (360, False)], ids=["light", "dark", "phone"]
)


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, from the npm registry in the version of the lock file."""
    return (node_packages("axe") / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def faults(browser: Browser, axe: str) -> list[str]:
    """What axe calls serious or critical on the page."""
    browser.driver.execute_script(axe)
    found: dict[str, Any] = browser.run("return await axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['html'][:200]} ({node['failureSummary'][:300]})"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def pages_of(browser: Browser, role: str) -> list[str]:
    """An address of every page that the console has for a role, read from the console's own list of routes.

    Of the pages of a `tenant-admin`, who has signed in, only those that no key has.
    """
    routes, entries = browser.run(
        """
        const start = document.querySelector("script[type=module]").src;
        const { routesFor, sectionsFor } = await import(new URL("pages.js", start).href);
        const seen = (who) => [
          routesFor(who).map((route) => route.pattern.source),
          sectionsFor(who).flatMap(([, found]) => found.map(([path]) => path)),
        ];
        const can = () => true;
        const ofKey = seen({ isAdmin: arguments[0] === "admin", managesTenant: false, can });
        if (arguments[0] !== "tenant-admin") return ofKey;
        const ofPerson = seen({ isAdmin: false, managesTenant: true, can });
        return ofPerson.map((all, which) => all.filter((one) => !ofKey[which].includes(one)));
        """,
        role,
    )
    examples = EXAMPLES[role]
    assert set(examples) == {one for one in routes if "(" in one}, "give each route with parameters an example"
    found = [examples.get(one) or one.strip("^$").replace("\\/", "/") for one in routes]
    assert set(entries) <= set(found), "an entry of the navigation leads nowhere"
    return found


@pytest.fixture
def places(server: ConsoleServer, tenant: ConsoleTenant) -> dict[str, str]:
    """What the pages show: an adapter, a session, a request, a person, prices and costs. Returns the names for their addresses."""
    for seed in (1, 2):
        origin = {"name": "pirate", "run": f"run {seed}"}
        tenant.client.post("/v1/adapters", data=origin, files=adapter_upload(seed)).raise_for_status()
    for alias in ("prod", "beta"):
        tenant.client.put(f"/v1/adapters/pirate/aliases/{alias}", json={"version": 1}).raise_for_status()
    change = {"tags": ["team:care"], "defaults": {"system": "Be brief.", "sampling": {"temperature": 0.5}}}
    tenant.client.patch("/v1/adapters/pirate", json=change).raise_for_status()
    steps = {"alias": "beta", "version": 2, "steps": [{"weight": 10, "seconds": 600}]}
    tenant.client.post("/v1/adapters/pirate/rollouts", json=steps).raise_for_status()
    prices = set_prices(server, tenant)
    session = tenant.client.post("/v1/sessions", json={"model": "pirate"}).json()["id"]
    answer = tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"}).raise_for_status()
    record_days(server, tenant, prices, days=2, size=1000)
    people = server.resources.people.people
    person = server.run(people.add("https://login.example.com", f"of {tenant.id}", f"ada-{tenant.id}@example.com"))
    for role in ("operator", f"tenant-admin:{tenant.id}"):
        server.run(people.grant(person.id, parse_grant(role)))
    request, month = answer.headers["x-request-id"], f"{datetime.now(UTC):%Y-%m}"
    return {"tenant": tenant.id, "session": session, "request": request, "month": month, "person": person.id}


def sign_in_as(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, role: str) -> None:
    """Signs in as one of the roles of `EXAMPLES`, and opens a page that all of them have."""
    if role == "tenant-admin":
        ticket = server.ticket(f"admin-{tenant.id}@example.com", f"tenant-admin:{tenant.id}")
        return browser.sign_in_person(server.url, ticket, "usage")
    return browser.sign_in(server.url, server.admin_key if role == "admin" else tenant.key, "usage")


@SIZES
def test_no_serious_fault(
    browser: Browser,
    server: ConsoleServer,
    tenant: ConsoleTenant,
    places: dict[str, str],
    axe: str,
    width: int,
    dark: bool,
) -> None:
    """No page of either kind of key, nor of a tenant-admin, has a serious fault or is wider than a phone, whatever pages the console has."""
    browser.resize(width, 860, dark)
    browser.open(f"{server.url}/console")
    browser.find("dialog")
    found = {"sign-in": faults(browser, axe)}
    for role in EXAMPLES:
        sign_in_as(browser, server, tenant, role)
        for page in pages_of(browser, role):
            path = page.format(**places)
            browser.driver.execute_script(
                "document.querySelector('h1').remove(); location.hash = arguments[0]", f"#/{path}"
            )
            heading = browser.find("h1").text
            found[f"{role} {path}"] = faults(browser, axe)
            assert heading not in ("Not found", "There is no such page", "This page cannot be shown"), path
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), path

    assert {page: one for page, one in found.items() if one} == {}


@SIZES
def test_no_serious_fault_in_dialogs(
    browser: Browser,
    server: ConsoleServer,
    tenant: ConsoleTenant,
    places: dict[str, str],
    axe: str,
    width: int,
    dark: bool,
) -> None:
    """No dialog has a serious fault, each fits on a phone, and Escape closes it."""
    browser.resize(width, 860, dark)
    found = {}
    for role in EXAMPLES:
        sign_in_as(browser, server, tenant, role)
        for page, button in DIALOGS[role]:
            if button == "Keyboard shortcuts" and width < 820:
                continue
            browser.driver.execute_script(
                """
                if (location.hash === arguments[0]) return;
                document.querySelector("h1").remove();
                location.hash = arguments[0];
                """,
                f"#/{page.format(**places)}",
            )
            browser.find("h1")
            browser.press(button)
            dialog = browser.find("dialog[open]")
            found[f"{page} {button}"] = faults(browser, axe)
            assert dialog.size["width"] <= width
            browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
            browser.wait(lambda: not browser.all("dialog"))

    assert {page: one for page, one in found.items() if one} == {}
