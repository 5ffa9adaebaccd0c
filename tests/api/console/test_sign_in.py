"""Tests of signing in, of keys that end while someone works, and of a server that is away."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from graftwork.platform.clock import SystemClock
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import KeyId, TenantId
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.in_process_gateway import adapter_upload


@contextmanager
def offline(browser: Browser) -> Iterator[None]:
    """Cuts the browser off from the server, without the event that wakes a page when the network is back."""
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*"]})
    try:
        yield
    finally:
        browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})


def test_the_key_decides_what_is_seen(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A tenant sees its name and no page of the operator; the operator sees tenants and engines, and no playground."""
    browser.sign_in(server.url, tenant.key, "sessions")
    own = [link.text for link in browser.all("#nav a")]
    browser.sign_in(server.url, server.admin_key, "tenants")
    operators = [link.text for link in browser.all("#nav a")]

    assert {"Playground", "Sessions"} <= set(own)
    assert {"Tenants", "Engines", "Audit"} <= set(operators)
    assert not {"Tenants", "Engines", "Audit"} & set(own)
    assert "Playground" not in operators


def test_a_wrong_key_says_so(browser: Browser, server: ConsoleServer) -> None:
    """A wrong key leaves the dialog open, with the server's reason."""
    browser.open(f"{server.url}/console")
    browser.find("dialog input").send_keys("gw_wrong", Keys.ENTER)

    assert "not valid" in browser.with_text("dialog .error", "API key").text


def test_no_script_sees_the_cookie(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Scripts of the page cannot read the cookie, and the browser keeps the key nowhere."""
    browser.sign_in(server.url, tenant.key, "sessions")
    kept = browser.run("return document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")

    assert tenant.key not in kept
    assert "gwc_" not in kept


def test_a_revoked_key_keeps_what_was_typed(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """When the key ends, the sign-in comes over the page; with another key of the tenant the message is sent."""
    tenancy = server.resources.account.tenancy
    _, second = server.run(tenancy.create_key(TenantId(tenant.id), "second"))
    session = tenant.client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.fill("Message", "Typed before the key ended")
    server.run(tenancy.revoke_key(TenantId(tenant.id), KeyId(tenant.key_id)))
    browser.find("dialog.sign-in")

    assert browser.field("Message").get_property("value") == "Typed before the key ended"
    browser.type_key(second)
    browser.press("Send")
    browser.with_text(".item", "Typed before the key ended")
    browser.with_text(".item.assistant", "nothing to say")


def test_an_expired_key_keeps_what_was_typed(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A key that expires while someone writes in the playground: the sign-in comes, and the next key sends the text."""
    tenancy = server.resources.account.tenancy
    short = server.run(tenancy.create_key(TenantId(tenant.id), "short", expires_at=SystemClock().now() + 4))[1]
    browser.sign_in(server.url, short, "playground")
    browser.heading("Playground")
    browser.find(".composer textarea").send_keys("Typed before the key expired")
    browser.wait(lambda: server.client(short).get("/v1/models").status_code == 401 or None)
    browser.press("Send")
    browser.with_text("dialog.sign-in", "keeps what you have typed")
    browser.type_key(tenant.key)

    browser.with_text(".said.user", "Typed before the key expired")
    browser.with_text(".said.assistant", "nothing to say")


def test_a_revoked_key_keeps_an_upload(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, tmp_path: Path
) -> None:
    """The files of an upload that met a revoked key are sent after the next sign-in, without choosing them again."""
    tenancy = server.resources.account.tenancy
    _, second = server.run(tenancy.create_key(TenantId(tenant.id), "second"))
    for name, content in adapter_upload(4).values():
        (tmp_path / Path(name).name).write_bytes(content)
    (tmp_path / "passwd").rename(tmp_path / "weights.safetensors")
    browser.sign_in(server.url, tenant.key, "adapters/upload")
    browser.fill("Name", "kept")
    browser.field("adapter_config.json").send_keys(str(tmp_path / "adapter_config.json"))
    browser.field("adapter_model.safetensors").send_keys(str(tmp_path / "weights.safetensors"))
    server.run(tenancy.revoke_key(TenantId(tenant.id), KeyId(tenant.key_id)))
    browser.press("Upload")
    browser.type_key(second)

    assert browser.heading("kept")


def test_an_engine_that_is_away_costs_no_typed_text(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant
) -> None:
    """While the engine is away the page says so and keeps the message; when it is back, the same press sends it."""
    session = tenant.client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.fill("Message", "Are you there?")
    server.model.refusal = Unavailable("The engine does not answer.", retry_after_s=1)
    browser.press("Send")
    browser.with_text("#banner", "tries again by itself")

    assert browser.field("Message").get_property("value") == "Are you there?"
    server.model.refusal = None
    browser.press("Send")
    browser.with_text(".item.assistant", "nothing to say")
    browser.wait(lambda: not browser.find_all_shown("#banner"))


def test_a_page_recovers_by_itself(browser: Browser, server: ConsoleServer) -> None:
    """When the server is away the page says so, and shows fresh figures when it is back, without a press."""
    browser.sign_in(server.url, server.admin_key, "replicas")
    browser.with_text(".card", "Address")
    with offline(browser):
        browser.with_text("#banner", "does not answer")
    browser.wait(lambda: not browser.find_all_shown("#banner"))


def test_a_page_that_could_not_be_loaded_comes_by_itself(browser: Browser, server: ConsoleServer) -> None:
    """A page that is opened while the server is away says so, and is there when the server is back, without a press."""
    browser.sign_in(server.url, server.admin_key, "tenants")
    with offline(browser):
        browser.go("prices", "This page cannot be shown")
        browser.with_text(".error", "does not answer")

    browser.heading("Prices")


def test_signing_out_asks_for_a_key(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """After a sign-out the next page asks for a key."""
    browser.sign_in(server.url, tenant.key, "sessions")
    browser.press("Sign out")
    browser.find("dialog.sign-in")
    browser.driver.refresh()

    assert browser.find("dialog.sign-in")


def test_keys_of_the_keyboard(browser: Browser, server: ConsoleServer) -> None:
    """`g n` opens the tenants, `/` goes to their filter, `t` changes the colours, `?` lists all keys."""
    browser.sign_in(server.url, server.admin_key, "audit")
    body = browser.find("body")
    body.send_keys("g", "n")
    browser.heading("Tenants")
    body.send_keys("t")
    assert browser.run("return document.documentElement.dataset.theme") in ("light", "dark")
    body.send_keys("?")
    browser.with_text("dialog", "Find in this page's list")
    browser.press("Close")
    browser.find("body").send_keys("/")
    browser.wait(lambda: browser.driver.switch_to.active_element.get_attribute("type") == "search")
