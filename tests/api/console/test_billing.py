"""Tests of prices and invoices in the browser: the operator sets them, a tenant reads its own, and no digit is lost."""

import csv
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.ledger import month_back, record, set_prices

THIS_MONTH = f"{datetime.now(UTC):%Y-%m}"
HOSTILE = "<img src=x onerror='window.hacked = 1'> شركة"


def lists_of(server: ConsoleServer, tenant: ConsoleTenant) -> list[dict[str, Any]]:
    answer = server.client(server.admin_key).get("/v1/admin/prices", params={"tenant_id": tenant.id})
    found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
    return found


def invoice_of(tenant: ConsoleTenant, month: str) -> dict[str, Any]:
    answer = tenant.client.get("/v1/usage/invoice", params={"month": month})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def row(browser: Browser, text: str) -> str:
    """The text of the row of a table that contains a text."""
    return browser.with_text("tbody tr", text).text


@pytest.fixture
def downloads(browser: Browser, tmp_path: Path) -> Path:
    """The folder in which the browser keeps files."""
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    return tmp_path


def downloaded(browser: Browser, folder: Path, ending: str) -> str:
    """Waits for a file, and returns its text."""
    return browser.wait(lambda: next(folder.glob(f"*{ending}"), None)).read_text()


def test_prices_are_set_for_a_tenant_and_a_tier(browser: Browser, server: ConsoleServer) -> None:
    """The rates that are typed are in force to the last digit, and the table shows them."""
    tenant = server.tenant("Priced by its tier")
    browser.sign_in(server.url, server.admin_key, "prices")
    browser.press("Set prices")
    browser.field("Tenant").send_keys(tenant.name)
    browser.field("Service tier").send_keys("flex")
    browser.fill("Input", "0.123457")
    browser.fill("Output", "999999.000001")
    browser.fill("Cached on disk", "0.1")
    browser.fill("Currency", "EUR")
    browser.press("Set prices")
    shown = row(browser, tenant.name)
    (found,) = lists_of(server, tenant)

    assert (found["service_tier"], found["currency"], found["in_force"]) == ("flex", "EUR", True)
    assert found["rates"]["input"] == found["rates"]["input_host"] == "0.123457"
    assert (found["rates"]["output"], found["rates"]["input_disk"]) == ("999999.000001", "0.1")
    assert {"flex", "0.123457", "999,999.000001", "EUR"} <= set(shown.split())
    assert "in force" in shown


def test_prices_that_begin_later_are_to_come(browser: Browser, server: ConsoleServer) -> None:
    """A list that begins in a year is shown as one to come, and is not in force."""
    tenant = server.tenant("Priced next year")
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("Set prices")
    browser.fill("Input", "1")
    browser.fill("Output", "2")
    begin = f"{datetime.now(UTC).year + 1}-12-31T12:00"
    browser.run("arguments[0].value = arguments[1]", browser.field("Valid from"), begin)
    browser.press("Set prices")
    browser.with_text(".card", "all tiers: 1 in, 2 out, USD")
    browser.go("prices", "Prices")

    assert "to come" in row(browser, tenant.name)
    assert [one["in_force"] for one in lists_of(server, tenant)] == [False]


def test_a_change_replaces_a_list(browser: Browser, server: ConsoleServer) -> None:
    """A change begins with the old rates; afterwards the old list is shown only where replaced ones are wanted."""
    tenant = server.tenant("Priced anew")
    set_prices(server, tenant, output="7.25")
    browser.sign_in(server.url, server.admin_key, "prices")
    browser.press(f"Change the prices of {tenant.name}")
    assert browser.field("Input").get_property("value") == "0.523457"
    browser.fill("Output", "8.5")
    browser.press("Set prices")
    assert "8.5" in row(browser, "8.5")
    assert "7.25" not in browser.text()
    browser.find("[aria-label='Which price lists']").send_keys("Also")

    assert "replaced" in row(browser, "7.25")
    assert [one["rates"]["output"] for one in lists_of(server, tenant)] == ["8.5", "7.25"]


def test_a_rate_that_is_no_decimal_is_refused(browser: Browser, server: ConsoleServer) -> None:
    """A rate with too many decimals is not sent, the dialog keeps what was typed, and a hostile name is text."""
    tenant = server.tenant(HOSTILE)
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")
    browser.press("Set prices")
    browser.with_text("dialog h2", "<img src=x")
    for wrong in ("0.1234567", "-1", "1e3", "1,5"):
        browser.fill("Input", wrong)
        browser.fill("Output", "1")
        browser.button("Set prices").click()
        assert browser.run("return arguments[0].validity.patternMismatch", browser.field("Input")), wrong

    assert browser.field("Output").get_property("value") == "1"
    assert lists_of(server, tenant) == []
    assert browser.run("return window.hacked ?? null") is None


def test_a_tenant_reads_its_own_prices(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A tenant sees the rates of its requests and nobody else's, and has no button that sets any."""
    other = server.tenant("Other")
    set_prices(server, other, input="77.7")
    browser.sign_in(server.url, tenant.key, "prices")
    assert "77.7" not in browser.text()
    set_prices(server, tenant, input="0.523457")
    browser.driver.refresh()
    browser.with_text(".rates", "0.523457")

    assert "1.5 USD per million tokens" in browser.find(".rates").text.replace("\n", " ")
    assert "77.7" not in browser.text()
    assert browser.all("main button") == []


def test_invoices_of_a_tenant(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, downloads: Path) -> None:
    """The months of a tenant add up to the invoice, the invoice's lines to its total, and both files have all digits."""
    prices = set_prices(server, tenant)
    for size in (12_345, 999_999_999, 1):
        record(server, tenant, prices, datetime.now(UTC), size)
    record(server, tenant, None, datetime.now(UTC), 5)
    invoice = invoice_of(tenant, THIS_MONTH)
    (total,) = invoice["totals"]
    browser.sign_in(server.url, tenant.key, "invoices")
    browser.heading("Invoices")
    assert total["amount"] in row(browser, "so far").replace(",", "")
    browser.find("tbody a").click()
    browser.with_text(".chip", "so far")
    browser.press("Download as CSV")
    browser.press("Download as JSON")
    rows = list(csv.DictReader(downloaded(browser, downloads, ".csv").splitlines()))

    assert total["amount"] in browser.find(".totals").text.replace(",", "")
    assert "1 requests began before" in browser.find(".notice").text
    assert len(browser.all("tbody tr")) == len(invoice["lines"]) == 6
    assert sum(Decimal(one["amount"]) for one in rows) == Decimal(total["amount"])
    assert [one["item"] for one in rows] == [one["item"] for one in invoice["lines"]]
    assert json.loads(downloaded(browser, downloads, ".json")) == invoice


def test_the_operator_goes_through_months(browser: Browser, server: ConsoleServer) -> None:
    """The operator chooses a month, sees what each tenant owes, and opens a final invoice with its lines."""
    tenant, other = server.tenant("Owes for last month"), server.tenant("Owes for this month")
    prices = set_prices(server, tenant, currency="EUR")
    past = month_back(1)
    record(server, tenant, prices, past, 4321)
    record(server, other, set_prices(server, other), datetime.now(UTC), 4321)
    amount = invoice_of(tenant, f"{past:%Y-%m}")["totals"][0]["amount"]
    browser.sign_in(server.url, server.admin_key, "invoices")
    browser.with_text("tbody th", other.name)
    assert tenant.name not in browser.text()
    browser.find("[aria-label=Month]").send_keys(f"{past:%B}")
    assert f"{amount} EUR" in row(browser, tenant.name)
    assert other.name not in browser.text()
    browser.press(f"Invoice of {tenant.name}")
    browser.heading(f"{past:%B %Y}")
    browser.with_text(".chip", "final")

    assert f"{amount} EUR" in browser.find(".totals").text
    browser.press(tenant.name)
    browser.heading("Invoices of Owes for last month")
    assert "final" in row(browser, f"{past:%B %Y}")


def test_keys_open_the_pages(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """`g c` opens the prices, and `g i` the invoices."""
    browser.sign_in(server.url, tenant.key, "usage")
    browser.find("body").send_keys("g", "c")
    browser.heading("Prices")
    browser.find("body").send_keys("g", "i")
    browser.heading("Invoices")


def test_the_costs_are_on_the_page_of_a_tenant(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The operator's page of a tenant has what this month costs so far."""
    record(server, tenant, set_prices(server, tenant), datetime.now(UTC), 1_000_003)
    amount = invoice_of(tenant, THIS_MONTH)["totals"][0]["amount"]
    browser.sign_in(server.url, server.admin_key, f"tenants/{tenant.id}")

    assert browser.with_text(".facts a", f"{amount} USD")
