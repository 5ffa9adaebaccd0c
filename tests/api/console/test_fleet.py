"""Tests of what the operator sees of several engines: their state, a drain, and plots that follow the requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.in_process_gateway import adapter_upload

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


@pytest.fixture
def whole_fleet(fleet: ConsoleServer, browser: Browser) -> Iterator[ConsoleServer]:
    """Both engines are there, before and after the test."""
    del browser
    yield fleet
    for model in fleet.models:
        model.is_absent = False
    fleet.run(fleet.resources.admin.replicas.list())


def ask(tenant: ConsoleTenant, times: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: tenant.client.post("/v1/chat/completions", json=ASK), range(times)))
    assert [one.status_code for one in answers] == [200] * times


def test_shares_and_budgets_are_plotted_live(browser: Browser, whole_fleet: ConsoleServer) -> None:
    """Requests that come while the overview is open change its plots: each tenant's share beside its fair share, the
    latency budget that it spends, and the tokens each second.
    """
    heavy, light = whole_fleet.tenant("Asks a lot", weight=3.0), whole_fleet.tenant("Asks little")
    browser.sign_in(whole_fleet.url, whole_fleet.admin_key)
    browser.with_text(".tile", "2 of 2")
    assert not any("Asks" in one.text for one in browser.all(".shares li"))
    ask(heavy, 12)
    ask(light, 4)
    browser.with_text(".shares li", "Asks a lot")
    label = browser.find(".shares .track[aria-label*='fair is 75 %']").get_attribute("aria-label") or ""
    browser.find("[aria-label^='Latency budget spent']")
    before = len(chart_points(browser))
    browser.wait(lambda: len(chart_points(browser)) > before)

    assert label.startswith("gets ")
    assert "misses its latency objective" in browser.find(".worst").text
    assert {"Asks a lot", "Asks little"} <= set(browser.find(".key-list").text.split("\n"))


def chart_points(browser: Browser) -> list[str]:
    """The points of the first line of the chart of tokens."""
    found = browser.run(
        "return document.querySelector(\"[aria-label^='Answer tokens'] polyline\")?.getAttribute('points')"
    )
    return str(found).split(" ") if found else []


def test_an_engine_that_is_away_comes_back_by_itself(browser: Browser, whole_fleet: ConsoleServer) -> None:
    """The page says that an engine is away and why, and shows it ready again without a press."""
    browser.sign_in(whole_fleet.url, whole_fleet.admin_key, "replicas")
    browser.wait(lambda: len(browser.all(".chip.good")) == 2 or None)
    whole_fleet.models[1].is_absent = True
    browser.with_text(".chip.bad", "absent")
    whole_fleet.models[1].is_absent = False

    browser.wait(lambda: len(browser.all(".chip.good")) == 2 or None)


def test_an_adapter_is_shown_on_its_tiers(browser: Browser, whole_fleet: ConsoleServer) -> None:
    """The lists show on which tier each adapter is, and at how many engines: the device, the host, or the store only."""
    tenant = whole_fleet.tenant("Has adapters")
    digests = {}
    for seed, name in enumerate(("on-device", "on-host", "stored")):
        answer = tenant.client.post("/v1/adapters", data={"name": name}, files=adapter_upload(seed)).raise_for_status()
        digests[name] = answer.json()["versions"][0]["digest"]
        tenant.client.post("/v1/chat/completions", json={**ASK, "model": name}).raise_for_status()
    for model in whole_fleet.models:
        model.resident = {digests["on-device"]: None}
    whole_fleet.models[0].on_host = (digests["on-host"],)
    wanted = {"on-device": "device of 2", "on-host": "host of 1", "stored": "store only"}
    browser.sign_in(whole_fleet.url, whole_fleet.admin_key, "adapters")
    for name, text in wanted.items():
        browser.wait(lambda: is_shown(browser, name, text))  # noqa: B023 - it is called within the loop
    browser.sign_in(whole_fleet.url, tenant.key, "adapters/name/on-host")

    assert browser.with_text("tbody .chip", "host")


def is_shown(browser: Browser, name: str, text: str) -> bool | None:
    """Whether the row of a name has the text."""
    return any(name in one and text in one for one in (row.text for row in browser.all("tbody tr"))) or None


def test_an_engine_drains(browser: Browser, whole_fleet: ConsoleServer) -> None:
    """One of two engines drains, and the other one then gets all requests."""
    tenant = whole_fleet.tenant("Asks the other engine")
    browser.sign_in(whole_fleet.url, whole_fleet.admin_key, "replicas")
    browser.press("Drain engine-0")
    browser.press("Drain")
    browser.with_text(".chip.warn", "draining")
    before = len(whole_fleet.models[0].requests)
    ask(tenant, 4)

    assert len(whole_fleet.models[0].requests) == before
    assert not browser.find("[aria-label='Drain engine-0']").is_enabled()
