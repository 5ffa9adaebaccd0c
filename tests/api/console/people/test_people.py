"""Tests of people in the console: the sign-in with an identity provider, seats, and a role that ends."""

from selenium.webdriver.support.select import Select

from tests.api.console.browser import Browser
from tests.api.console.people.office import Office


def test_a_person_signs_in_and_changes_seats(browser: Browser, office: Office) -> None:
    """The button leads to the provider and back; the page shows the person, who chooses what to act as."""
    tenant = office.server.tenant("Acme")
    office.person("ada", "operator", f"tenant-member:{tenant.id}")
    office.provider.subject = "ada"
    browser.open(f"{office.server.url}/console")

    button = browser.find("#sign-in-with")
    name = button.text
    button.click()
    who = browser.with_text("#who", "ada@example.com")
    operators = [link.text for link in browser.all("#nav a")]
    Select(who.find_element("id", "seat")).select_by_visible_text("Acme")
    browser.with_text("#nav", "Playground")
    tenants = [link.text for link in browser.all("#nav a")]

    assert name == "Sign in with Example <b>"
    assert "Audit" in operators
    assert "Audit" not in tenants


def test_a_role_that_ends_brings_the_sign_in(browser: Browser, office: Office) -> None:
    """When a person is suspended, the page says so at the next request, and the way back opens beside it."""
    person_id = office.person("bob", "operator")
    office.provider.subject = "bob"
    browser.open(f"{office.server.url}/console")
    browser.find("#sign-in-with").click()
    browser.with_text("#who", "bob@example.com")

    office.server.run(office.server.resources.people.people.suspend(person_id))
    browser.run("location.hash = '#/audit'")
    dialog = browser.find("dialog.sign-in")

    assert "you are suspended" in dialog.text
    assert browser.find("#sign-in-with").get_attribute("target") == "_blank"
    browser.complaints()  # the 401 is in the browser's log


def test_a_stranger_is_told_the_id(browser: Browser, office: Office) -> None:
    """Somebody without a role comes back to the sign-in, which shows the id to tell the operator."""
    office.provider.subject = "eve"
    browser.open(f"{office.server.url}/console")
    browser.find("#sign-in-with").click()

    said = browser.with_text("dialog .error", "have no role here").text

    assert "Your id is per_" in said
    assert "sign_in" not in browser.driver.current_url
    browser.complaints()
