"""Tests that whatever somebody else has named is text on every page."""

from typing import Any

from graftwork.platform.people.roles import parse_grant
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer
from tests.api.console.ledger import record_days, set_prices
from tests.api.console.test_accessibility import EXAMPLES, pages_of, sign_in_as
from tests.api.in_process_gateway import adapter_upload

MARKUP = "<img src=x onerror='window.hacked = 1'><b>Acme</b>"
TURNED = MARKUP + "\u202e\u2067"
"""The same with marks that turn the direction of writing, which names of tenants and keys may not have."""


def test_hostile_names_are_text_on_every_page(browser: Browser, server: ConsoleServer) -> None:
    """A tenant, a key, a person, a session's facts and an adapter's origin and defaults with markup and marks of
    writing direction: each page of either kind of key, and of a tenant-admin, shows text, nothing runs, and each name keeps its direction.
    """
    tenant = server.tenant(MARKUP)
    client = tenant.client
    server.run(server.resources.account.tenancy.create_key(tenant.id, MARKUP))  # type: ignore[arg-type]
    client.post("/v1/adapters", data={"name": "pirate", "run": MARKUP}, files=adapter_upload(1)).raise_for_status()
    client.patch("/v1/adapters/pirate", json={"defaults": {"system": TURNED}}).raise_for_status()
    new: dict[str, Any] = {"model": "pirate", "metadata": {"about": TURNED}, "instructions": TURNED}
    session = client.post("/v1/sessions", json=new).raise_for_status().json()["id"]
    answer = client.post(f"/v1/sessions/{session}/turns", json={"input": TURNED}).raise_for_status()
    record_days(server, tenant, set_prices(server, tenant), days=2, size=1000)
    people = server.resources.people.people
    person = server.run(people.add(TURNED, TURNED, TURNED))
    server.run(people.grant(person.id, parse_grant(f"tenant-admin:{tenant.id}")))
    things = {"tenant": tenant.id, "session": session, "person": person.id, "month": "2026-01"}
    things["request"] = answer.headers["x-request-id"]
    said = set()
    for role in EXAMPLES:
        sign_in_as(browser, server, tenant, role)
        for page in pages_of(browser, role):
            browser.driver.execute_script(
                "document.querySelector('h1').remove(); location.hash = arguments[0]", f"#/{page.format(**things)}"
            )
            browser.find("h1")
            browser.wait(lambda: "Loading…" not in browser.text() or None)
            if "<img src=x" in browser.text():
                said.add(f"{role} {page}")
            assert browser.all("main img, main b, #who img, #who b") == [], page
            assert browser.run("return window.hacked ?? null") is None, page
            assert browser.run(LOOSE) == [], page

    assert said >= {"admin tenants", "admin tenants/{tenant}", "admin people", "admin people/{person}"}
    assert "tenant-admin keys" in said
    assert said >= {"tenant sessions", "tenant sessions/{session}", "tenant adapters/name/pirate"}


LOOSE = """
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
while (walker.nextNode()) {
  const node = walker.currentNode;
  const box = node.parentElement;
  if (!/[\\u202a-\\u202e\\u2066-\\u2069]/.test(node.data) || box.closest("textarea, option")) continue;
  if (!["isolate", "plaintext"].includes(getComputedStyle(box).unicodeBidi)) found.push(box.outerHTML.slice(0, 200));
}
return found;
"""
"""The elements whose text has a mark of writing direction that reaches the text around them."""
