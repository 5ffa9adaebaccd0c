"""Tests of the console on a server with 200 tenants, 300 adapters and 2,000 sessions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant, console_server
from tests.api.console.many_rows import fill
from tests.api.console.test_accessibility import pages_of

pytestmark = pytest.mark.slow
ROWS_OF_A_PAGE = 50
FIRST_PAINT_S = 1.0
_TRIES = 5


@pytest.fixture(scope="module")
def full(
    one_browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ConsoleServer, ConsoleTenant]]:
    """The server, and the tenant with the adapters and sessions."""
    del one_browser  # without a browser, nothing is filled
    with console_server(Path(tmp_path_factory.mktemp("full")) / "gateway") as server:
        owner = server.tenant("Owner of it all")
        fill(server, owner)
        yield server, owner


def paints(browser: Browser) -> dict[str, float]:
    """Milliseconds from the navigation to the first paint, and to the first row of the list."""
    found: dict[str, Any] = browser.run(
        """
        while (!document.querySelector("tbody tr")) await new Promise((resolve) => setTimeout(resolve, 5));
        const rows = performance.now();
        const paint = performance.getEntriesByType("paint").find((one) => one.name === "first-contentful-paint");
        return {paint: paint.startTime, rows};
        """
    )
    return found


@pytest.mark.parametrize("page", ["tenants", "adapters", "sessions"])
def test_first_paint_and_pages(
    one_browser: Browser,
    full: tuple[ConsoleServer, ConsoleTenant],
    page: str,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first paint of a browser with an empty cache comes within a second, and the list asks for one page of rows, and for the next when it is wanted."""
    server, owner = full
    browser = one_browser
    browser.resize(1280, 860)
    browser.sign_in(server.url, server.admin_key if page == "tenants" else owner.key, page)
    tries = []
    for _ in range(_TRIES):
        browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        browser.driver.refresh()
        browser.find("tbody tr")
        tries.append(paints(browser))
    best = min(tries, key=lambda one: one["paint"])
    record_property(page, best)
    with capsys.disabled():
        print(f"\n{page}: first paint {best['paint']:.0f} ms, first row {best['rows']:.0f} ms, all {tries}")  # noqa: T201
    asked = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    lists = [url for url in asked if f"/{page}?" in url and "overview" not in url]

    assert best["paint"] < FIRST_PAINT_S * 1000
    assert len(browser.all("tbody tr")) == ROWS_OF_A_PAGE
    assert all("limit=50" in url for url in lists)
    browser.press("Load more")
    browser.wait(lambda: len(browser.all("tbody tr")) == 2 * ROWS_OF_A_PAGE or None)


def test_first_paint_of_every_page(
    one_browser: Browser,
    full: tuple[ConsoleServer, ConsoleTenant],
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each page that the navigation names has its first paint within a second, whatever it has to load."""
    server, owner = full
    found = {}
    for role, key in (("admin", server.admin_key), ("tenant", owner.key)):
        one_browser.sign_in(server.url, key, "usage")
        for path in [one for one in pages_of(one_browser, role) if "{" not in one]:
            one_browser.go(path, "")
            tries = []
            for _ in range(_TRIES):
                one_browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
                one_browser.driver.refresh()
                one_browser.find("h1")
                tries.append(first_paint(one_browser))
            found[f"{role} {path}"] = round(min(tries))
    record_property("first_paints", found)
    with capsys.disabled():
        print(f"\nfirst paint in ms: {found}")  # noqa: T201

    assert max(found.values()) < FIRST_PAINT_S * 1000


@pytest.mark.parametrize("page", ["prices", "invoices"])
def test_lists_of_money_come_page_by_page(
    one_browser: Browser, full: tuple[ConsoleServer, ConsoleTenant], page: str
) -> None:
    """Of 199 tenants with prices and costs the page draws 50, and the next 50 when they are wanted."""
    server, _ = full
    one_browser.sign_in(server.url, server.admin_key, page)
    one_browser.wait(lambda: len(one_browser.all("tbody tr")) == ROWS_OF_A_PAGE or None)
    one_browser.press("Load more")
    one_browser.wait(lambda: len(one_browser.all("tbody tr")) == 2 * ROWS_OF_A_PAGE or None)


def first_paint(browser: Browser) -> float:
    """Milliseconds from the navigation to the first paint."""
    script = "performance.getEntriesByType('paint').find((one) => one.name === 'first-contentful-paint').startTime"
    return float(browser.run(f"return {script}"))


def test_a_search_finds_the_oldest_session(one_browser: Browser, full: tuple[ConsoleServer, ConsoleTenant]) -> None:
    """A search reads on through 2,000 sessions until it has them all."""
    server, owner = full
    one_browser.sign_in(server.url, owner.key, "sessions")
    one_browser.find("input[type=search]").send_keys("ticket-of-none")
    one_browser.with_text(".table-foot", "0 of 2,000 loaded sessions")
