"""Makes the pictures of the docs from a busy gateway whose models follow a script.

python -m tests.api.console.pictures [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from tests.api.console.browser import Browser, chromium
from tests.api.console.console_server import ConsoleServer, console_server
from tests.api.console.lively_server import OBJECTIVES, Lively, fill, traffic

DOCS = Path(__file__).parents[3] / "docs"
PICTURES = DOCS / "images"
ENGINES = 3
LAPTOP, PHONE = (1280, 860), (390, 844)
POINTS = 12
"""The points that the overview's charts must have before its picture is taken: one for each second."""


class Camera:
    """Takes pictures of pages that have loaded, and keeps their names."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser = browser
        self.folder = folder
        self.names: list[str] = []

    def shoot(self, name: str, size: tuple[int, int] = LAPTOP, dark: bool = False) -> None:
        """Writes `name`.png. Fails if a part of the page still loads, or could not be loaded."""
        browser = self.browser
        browser.resize(*size, dark=dark)
        browser.wait(lambda: "Loading…" not in browser.text() or None)
        assert not browser.find_all_shown("main .error, #banner"), name
        browser.shoot(self.folder / f"{name}.png")
        self.names.append(f"{name}.png")
        browser.resize(*LAPTOP)


def take_all(browser: Browser, server: ConsoleServer, folder: Path) -> list[str]:
    """Takes each picture, and returns their names."""
    browser.resize(*LAPTOP)
    lively = fill(server)
    camera = Camera(browser, folder)
    take_operators(browser, server, lively, camera)
    take_tenants(browser, server, lively, camera)
    return camera.names


def take_operators(browser: Browser, server: ConsoleServer, lively: Lively, camera: Camera) -> None:
    """What the operator sees: who suffers, a tenant, prices, invoices."""
    with traffic(lively):
        browser.sign_in(server.url, server.admin_key)
        browser.with_text(".worst li", "refused")
        browser.with_text(".worst li", "misses its latency objective")
        browser.wait(lambda: has_points(browser) or None)
        camera.shoot("console-overview")
        camera.shoot("console-overview-dark", dark=True)
        camera.shoot("console-overview-phone", PHONE)
        browser.go("replicas", "Engines")
        browser.wait(lambda: len(browser.all(".card .chip.good")) == ENGINES or None)
        camera.shoot("console-engines")
        browser.go("adapters", "Adapters")
        browser.with_text("tbody tr", "device of")
        camera.shoot("console-residency")
    browser.go("tenants", "Tenants")
    browser.press("New tenant")
    browser.fill("Name", "Harbour Pilots")
    browser.press("Create tenant")
    browser.find("#secret")
    camera.shoot("console-new-key")
    browser.press("I have stored it")
    browser.go(f"tenants/{lively.shown.id}", lively.shown.name)
    browser.find(".card .chart")
    camera.shoot("console-tenant")
    browser.go("prices", "Prices")
    camera.shoot("console-prices")
    browser.go(f"invoices/{lively.shown.id}", "Invoices of")
    camera.shoot("console-months")
    browser.all("tbody a")[1].click()
    browser.find(".totals")
    camera.shoot("console-invoice")


def take_tenants(browser: Browser, server: ConsoleServer, lively: Lively, camera: Camera) -> None:
    """What a tenant sees: its keys and members, its adapter, its session, a request's life, the playground."""
    server.ticket("grace@example.com", f"tenant-member:{lively.shown.id}")
    ticket = server.ticket("ada@example.com", f"tenant-admin:{lively.shown.id}")
    browser.sign_in_person(server.url, ticket, "keys")
    browser.with_text("tbody tr", "first")
    camera.shoot("console-keys")
    browser.sign_in(server.url, lively.shown.key, "adapters/name/support")
    browser.with_text("tbody tr", "canary")
    camera.shoot("console-adapter")
    browser.go(f"sessions/{lively.session}", lively.session[-8:])
    browser.with_text(".tree", "3 sessions")
    camera.shoot("console-session")
    camera.shoot("console-session-phone", PHONE)
    browser.go(f"requests/{lively.request}", "Request")
    camera.shoot("console-request")
    browser.go("playground", "Playground")
    browser.find(".composer textarea").send_keys("Could I still get a refund?")
    browser.press("Send")
    browser.wait(lambda: len(browser.all(".figures")) >= 2 or None)
    browser.all(".lane:first-child .token")[7].click()
    camera.shoot("console-playground")


def has_points(browser: Browser) -> bool:
    """Whether each chart of the overview has enough points."""
    found: list[int] = browser.run(
        "return [...document.querySelectorAll('.chart polyline')].map((one) => one.points.numberOfItems)"
    )
    return len(found) > 2 and min(found) >= POINTS


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as data,
        console_server(Path(data) / "gateway", engines=ENGINES, objectives=OBJECTIVES) as server,
        chromium() as browser,
    ):
        take_all(browser, server, Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
