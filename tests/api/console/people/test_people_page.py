"""Tests of the operator's pages of people: who they are, their roles, and what ends them."""

from typing import Any

from selenium.webdriver.support.select import Select

from graftwork.platform.people.roles import parse_grant
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.people.office import Office

ISSUER = "https://login.example.com"


def person_of(server: ConsoleServer, subject: str) -> dict[str, Any] | None:
    """What the API says of a person, or None."""
    answer = server.client(server.admin_key).get("/v1/admin/people", params={"subject": subject}).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]
    return found[0] if found else None


def add(server: ConsoleServer, subject: str, *roles: str) -> str:
    """Adds a person with these roles, and returns the id."""
    people = server.resources.people.people
    person = server.run(people.add(ISSUER, subject, None))
    for role in roles:
        server.run(people.grant(person.id, parse_grant(role)))
    return person.id


def choose(browser: Browser, label: str, text: str) -> None:
    Select(browser.field(label)).select_by_visible_text(text)


def test_a_person_is_added_with_a_role(browser: Browser, server: ConsoleServer) -> None:
    """A name that no tenant has is refused before the person is added; with the right one both are there."""
    tenant = server.tenant("Harbour of Grace")
    browser.sign_in(server.url, server.admin_key, "people")
    browser.press("Add a person")
    browser.fill("Id at the identity provider", "grace")
    browser.fill("E-mail address", "grace@example.com")
    browser.fill("Identity provider", ISSUER)
    choose(browser, "First role", "Tenant admin")
    browser.fill("In the tenant", "Harbour of Nobody")
    browser.press("Add the person")
    browser.with_text("dialog .error", "No tenant has this name")
    assert person_of(server, "grace") is None
    browser.fill("In the tenant", "Harbour of Grace")
    browser.press("Add the person")
    browser.heading("grace@example.com")

    assert browser.with_text("tbody tr", "Tenant admin of Harbour of Grace")
    found = person_of(server, "grace")
    assert found is not None
    assert (found["email"], found["issuer"]) == ("grace@example.com", ISSUER)
    assert found["roles"] == [f"tenant-admin:{tenant.id}"]


def test_a_refused_role_keeps_the_person(browser: Browser, server: ConsoleServer) -> None:
    """The server refuses an unknown tenant's id after the person was added: with another role the same person gets it."""
    browser.sign_in(server.url, server.admin_key, "people")
    browser.press("Add a person")
    browser.fill("Id at the identity provider", "hedy")
    browser.fill("Identity provider", ISSUER)
    choose(browser, "First role", "Tenant viewer")
    browser.fill("In the tenant", "ten_0unknown")
    browser.press("Add the person")
    browser.with_text("dialog .error", "There is no tenant")
    choose(browser, "First role", "Operator, read only")
    browser.press("Add the person")
    browser.heading("hedy")

    assert (person_of(server, "hedy") or {})["roles"] == ["operator-readonly"]


def test_roles_are_granted_and_taken_back(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The page of a person grants a role by a tenant's id, and takes one back; the server has the same."""
    person_id = add(server, "joan", "operator")
    browser.sign_in(server.url, server.admin_key, f"people/{person_id}")
    browser.with_text("tbody tr", "Operator")
    browser.press("Grant a role")
    choose(browser, "Role", "Tenant viewer")
    browser.fill("In the tenant", tenant.id)
    browser.press("Grant")
    browser.with_text("tbody tr", "Tenant viewer of Acme")
    browser.press("Take back Operator")
    browser.press("Take back")
    browser.wait(lambda: len(browser.all("tbody tr")) == 1 or None)

    assert (person_of(server, "joan") or {})["roles"] == [f"tenant-viewer:{tenant.id}"]


def test_a_person_is_suspended_resumed_and_deleted(browser: Browser, server: ConsoleServer) -> None:
    """A suspension shows that no role holds; deleting asks for the name and leads to the list, which has it no more."""
    person_id = add(server, "mary", "operator")
    browser.sign_in(server.url, server.admin_key, f"people/{person_id}")
    browser.press("Suspend")
    browser.press("Suspend")
    browser.with_text(".page-head .chip", "suspended")
    browser.with_text(".notice", "No role holds")
    assert (person_of(server, "mary") or {})["status"] == "suspended"
    browser.press("Resume")
    browser.press("Resume")
    browser.with_text(".page-head .chip", "active")
    assert (person_of(server, "mary") or {})["status"] == "active"
    browser.press("Delete")
    browser.fill("Type the name to go on", "joan")
    browser.press("Delete for ever")
    browser.with_text("dialog .error", "not the name")
    browser.fill("Type the name to go on", "mary")
    browser.press("Delete for ever")
    browser.heading("People")

    assert person_of(server, "mary") is None
    assert "mary" not in browser.text()


def test_the_list_finds_the_people_of_a_tenant(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The list loads 50 people; the link on a tenant's page finds those with a role there, also beyond the first 50."""
    add(server, "needle", f"tenant-admin:{tenant.id}")
    for number in range(60):
        add(server, f"hay-{tenant.id[4:]}-{number}")
    browser.sign_in(server.url, server.admin_key, "people")
    browser.wait(lambda: len(browser.all("tbody tr")) == 50 or None)
    assert "needle" not in browser.text()
    browser.go(f"tenants/{tenant.id}", "Acme")
    browser.press("with a role of this tenant")
    browser.heading("People")
    browser.with_text("tbody tr", "needle")

    assert len(browser.all("tbody tr")) == 1
    assert "Tenant admin of Acme" in browser.find("tbody tr").text


def test_an_operator_takes_back_the_own_role(browser: Browser, office: Office) -> None:
    """The dialog says that it is about oneself; then the sign-in comes over the page."""
    person_id = office.person("rosa", "operator")
    office.sign_in(browser, "rosa")
    browser.go(f"people/{person_id}", "rosa")
    browser.press("Take back Operator")
    browser.with_text("dialog", "This is you")
    browser.press("Take back")

    assert "Your role here was taken back" in browser.find("dialog.sign-in").text
    browser.complaints()  # the 401 is in the browser's log
