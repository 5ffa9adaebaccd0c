"""Tests of what people with a screen reader, a keyboard or a phone get, by axe-core's rules."""

from typing import Any

import pytest

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.in_process_gateway import adapter_upload
from tests.clients.environments import node_packages

ADMIN_PAGES = (
    "",
    "tenants",
    "tenants/{tenant}",
    "adapters",
    "sessions",
    "replicas",
    "requests",
    "usage",
    "audit",
    "modes",
)
TENANT_PAGES = (
    "",
    "adapters",
    "adapters/upload",
    "adapters/name/pirate",
    "sessions",
    "sessions/{session}",
    "playground",
    "usage",
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


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False)], ids=["light", "dark", "phone"])
def test_no_serious_fault(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, axe: str, width: int, dark: bool
) -> None:
    """No page of either kind of key has a serious fault, and none is wider than a phone."""
    tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=adapter_upload(1)).raise_for_status()
    tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1}).raise_for_status()
    session = tenant.client.post("/v1/sessions", json={"model": "pirate"}).json()["id"]
    tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"}).raise_for_status()
    browser.resize(width, 860, dark)
    browser.open(f"{server.url}/console")
    browser.find("dialog")
    found = {"sign-in": faults(browser, axe)}
    for key, pages in ((server.admin_key, ADMIN_PAGES), (tenant.key, TENANT_PAGES)):
        browser.sign_in(server.url, key, "usage")
        for page in pages:
            path = page.format(tenant=tenant.id, session=session)
            browser.driver.execute_script(
                "document.querySelector('h1').remove(); location.hash = arguments[0]", f"#/{path}"
            )
            browser.find("h1")
            found[path] = faults(browser, axe)
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), path

    assert {page: one for page, one in found.items() if one} == {}
