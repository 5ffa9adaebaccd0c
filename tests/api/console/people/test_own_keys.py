"""Tests of the page of a tenant-admin: the keys and the members of the own tenant."""

import pytest
from selenium.webdriver.common.keys import Keys

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant

HOSTILE = "<img src=x onerror='window.hacked = 1'>"


def open_page(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, name: str = "ada@example.com") -> None:
    """Signs a new tenant-admin in, and opens the page when its lists are there."""
    browser.sign_in_person(server.url, server.ticket(name, f"tenant-admin:{tenant.id}"), "keys")
    browser.heading("Keys and members")
    browser.with_text("tbody tr", "first")


def status_of(server: ConsoleServer, key: str) -> int:
    return server.client(key).get("/v1/models").status_code


def test_a_key_is_made_and_shown_once(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A tenant-admin makes a key for one scope, which works; afterwards the page shows only its beginning."""
    open_page(browser, server, tenant)
    browser.press("New key")
    browser.fill("Name", "made here")
    for label in ("Inference and sessions", "Read sessions", "Change adapters", "Export everything"):
        browser.field(label).click()
    browser.press("Create key")
    key = browser.find("#secret").text
    browser.press("I have stored it")
    row = browser.with_text("tbody tr", "made here")
    client = server.client(key)

    assert [client.get(path).status_code for path in ("/v1/usage", "/v1/sessions")] == [200, 403]
    assert key.split("_")[1] in row.text
    assert key not in browser.driver.page_source


def test_a_key_is_rotated_and_revoked(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A rotation shows a new key and ends the old one; a revocation asks first, and a no changes nothing."""
    open_page(browser, server, tenant)
    browser.press("Rotate first")
    browser.press("Rotate")
    fresh = browser.find("#secret").text
    browser.press("I have stored it")
    rotated = (status_of(server, tenant.key), status_of(server, fresh))
    browser.press("Revoke first")
    browser.press("Cancel")
    kept = status_of(server, fresh)
    browser.press("Revoke first")
    browser.press("Revoke")
    browser.with_text("td .chip", "revoked")

    assert (rotated, kept, status_of(server, fresh)) == ((401, 200), 200, 401)


def test_the_keyboard_is_enough(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """`g k` opens the page; the dialogs take what is typed, Enter sends, and the focus comes back to its button."""
    browser.sign_in_person(server.url, server.ticket("kay@example.com", f"tenant-admin:{tenant.id}"))
    browser.find("body").send_keys("gk")
    browser.heading("Keys and members")
    focused = browser.button("New key")
    browser.driver.execute_script("arguments[0].focus()", focused)
    focused.send_keys(Keys.ENTER)
    browser.find("dialog[open]")
    browser.driver.switch_to.active_element.send_keys("typed", Keys.ENTER)
    key = browser.find("#secret").text
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.with_text("tbody tr", "typed")

    assert status_of(server, key) == 200
    assert browser.driver.switch_to.active_element.text == "New key"


def test_members_are_listed(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The members are those of this tenant, with their roles; their names are text, and their keys cannot be ended here."""
    server.ticket(HOSTILE, f"tenant-viewer:{tenant.id}")
    server.ticket("stranger@example.com", f"tenant-viewer:{server.tenant('Other').id}")
    open_page(browser, server, tenant)
    member = browser.with_text("section:last-of-type tbody tr", HOSTILE)
    keys = [row for row in browser.all("section:first-of-type tbody tr") if "a person's" in row.text]

    assert "Tenant viewer" in member.text
    assert "Tenant admin" in browser.with_text("section:last-of-type tbody tr", "ada@example.com").text
    assert "stranger" not in browser.text()
    assert len(keys) == 2
    assert [button for row in keys for button in row.find_elements("css selector", "button")] == []
    assert browser.all("main img") == []
    assert browser.run("return window.hacked ?? null") is None


@pytest.mark.parametrize("role", ["tenant-member", "key"])
def test_others_have_no_such_page(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, role: str) -> None:
    """A member and a key with all scopes find the page neither in the navigation nor at its address."""
    if role == "key":
        browser.sign_in(server.url, tenant.key, "keys")
    else:
        browser.sign_in_person(server.url, server.ticket("mem@example.com", f"{role}:{tenant.id}"), "keys")

    assert browser.find("h1").text in ("Not found", "There is no such page")
    assert "Keys" not in browser.find("#nav").text


def test_a_key_takes_the_page_away(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Who signs in again with a key, after the sign-in as a tenant-admin has ended, no longer finds the page."""
    open_page(browser, server, tenant)
    browser.driver.delete_all_cookies()
    browser.press("New key")
    browser.fill("Name", "too late")
    browser.press("Create key")
    browser.find("dialog.sign-in")
    browser.type_key(tenant.key)

    browser.wait(lambda: "Keys" not in browser.find("#nav").text or None)
    assert browser.heading("There is no such page")
    assert browser.find("#who").text == "Acme"
