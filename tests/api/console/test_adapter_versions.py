"""Tests of what becomes of an adapter's versions in the browser: roll-outs, history, the way back, tags, defaults."""

import itertools
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.test_adapters import push


def with_prod(tenant: ConsoleTenant, name: str = "pirate") -> None:
    """An adapter with two versions, of which `prod` selects the first."""
    push(tenant, name, 1, 2)
    tenant.client.put(f"/v1/adapters/{name}/aliases/prod", json={"version": 1}).raise_for_status()


def test_a_rollout_is_started_and_cancelled(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The steps and limits that are typed are in force, the alias is divided at once, the step's figures are shown, and a
    cancellation gives the alias back.
    """
    with_prod(tenant)
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("Start a roll-out")
    browser.fill("Steps", "10:fast")
    browser.press("Start")
    browser.with_text("dialog .error", "10:fast")
    browser.fill("Steps", "10:30m, 50:1h")
    browser.fill("More errors, in %", "3")
    browser.press("Start")
    browser.with_text("tbody tr", "50 % for 1 h")
    (made,) = tenant.client.get("/v1/adapters/pirate/rollouts").json()["data"]
    browser.with_text("tbody tr", "90 % version 1, 10 % version 2")

    assert made["steps"] == [{"weight": 10, "seconds": 1800}, {"weight": 50, "seconds": 3600}]
    assert made["limits"]["error_rate"] == 0.03
    assert (made["version"], made["stable"], made["state"]) == (2, 1, "running")

    numbers = itertools.count()

    def asked_until_shown() -> bool:  # requests count from the moment when the gateway knows of the roll-out
        asked = {"model": "pirate", "user": f"user {next(numbers)}", "messages": [{"role": "user", "content": "x"}]}
        tenant.client.post("/v1/chat/completions", json=asked).raise_for_status()
        return any("requests, 0 failed, 0 refused" in row.text for row in browser.all("tbody tr"))

    browser.wait(asked_until_shown)
    browser.press("Cancel the roll-out of prod")
    browser.press("Cancel the roll-out")
    browser.with_text("tbody .chip", "cancelled")
    browser.with_text("tbody tr", "fixed")

    assert tenant.client.get("/v1/adapters/pirate").json()["aliases"] == {"prod": {"version": 1}}


def test_an_alias_is_rolled_back_and_tells_its_history(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant
) -> None:
    """A rollback gives the alias its former target, and the history has each change with the key that made it."""
    with_prod(tenant)
    tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 2}).raise_for_status()
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("Roll back prod")
    browser.press("Roll back")
    browser.wait(lambda: tenant.client.get("/v1/adapters/pirate").json()["aliases"] == {"prod": {"version": 1}} or None)
    browser.with_text("tbody tr", "version 1")
    browser.press("History of prod")
    browser.with_text("dialog tbody tr", "rollback")
    rows = [row.text for row in browser.all("dialog tbody tr")]

    assert len(rows) == 3
    assert all(tenant.key_id in row for row in rows)
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)


def test_what_was_deleted_is_restored(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A version that was deleted is restored on the adapter's page, and an adapter in the list of the deleted ones."""
    with_prod(tenant)
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("Delete version 2")
    browser.press("Delete")
    browser.press("Restore version 2")
    browser.button("Delete version 2")
    assert len(tenant.client.get("/v1/adapters/pirate").json()["versions"]) == 2

    tenant.client.delete("/v1/adapters/pirate").raise_for_status()
    browser.go("adapters", "Adapters")
    assert "pirate" not in browser.text()
    browser.find("select[aria-label=State]").send_keys("Deleted")
    browser.press("Restore pirate")
    browser.heading("pirate")

    assert tenant.client.get("/v1/adapters/pirate").json()["aliases"] == {"prod": {"version": 1}}


def test_tags_narrow_the_list(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Tags that are typed are stored; a tag leads to the adapters that have it, and a wrong one is refused with its reason."""
    push(tenant, "pirate", 1)
    push(tenant, "terse", 2)
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("Tags")
    browser.fill("Tags", "Team Care")
    browser.press("Save")
    browser.with_text("dialog .error", "tags")
    browser.fill("Tags", "team:care, lang:en")
    browser.press("Save")
    browser.with_text(".page-head .chip", "team:care")
    assert tenant.client.get("/v1/adapters/pirate").json()["tags"] == ["lang:en", "team:care"]
    browser.press("team:care")
    browser.heading("Adapters")
    browser.with_text("tbody tr", "pirate")

    assert "terse" not in browser.text()


def test_defaults_are_set(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Defaults that are typed hold for requests; text that is no JSON, and a default that no request could use, are
    refused in the dialog, which keeps what was typed.
    """
    push(tenant, "pirate", 1)
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("Change defaults")
    browser.fill("System message", "Talk like a pirate.")
    browser.fill("Sampling, as JSON", "{temperature")
    browser.press("Save")
    browser.with_text("dialog .error", "Sampling")
    browser.fill("Sampling, as JSON", '{"temperature": 9}')
    browser.press("Save")
    browser.with_text("dialog .error", "temperature")
    assert browser.field("System message").get_property("value") == "Talk like a pirate."
    browser.fill("Sampling, as JSON", '{"temperature": 0.5}')
    browser.press("Save")
    browser.with_text(".facts", "Talk like a pirate.")

    found = tenant.client.get("/v1/adapters/pirate").json()["defaults"]
    assert (found["system"], found["sampling"]) == ("Talk like a pirate.", {"temperature": 0.5})


def test_an_upload_says_where_it_comes_from(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, tmp_path: Path
) -> None:
    """A version that is uploaded without being promoted says so, with its run and its parent."""
    push(tenant, "pirate", 1)
    (tmp_path / "adapter_config.json").write_bytes(config_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(7)))
    browser.sign_in(server.url, tenant.key, "adapters/upload?name=pirate")
    browser.field("adapter_config.json").send_keys(str(tmp_path / "adapter_config.json"))
    browser.field("adapter_model.safetensors").send_keys(str(tmp_path / "adapter_model.safetensors"))
    browser.field("Requests for the plain name get this version").click()
    browser.with_text("summary", "Where it comes from").click()
    browser.fill("Training run", "run <b>42</b>")
    browser.fill("Parent version", "pirate@1")
    browser.press("Upload")
    browser.heading("pirate")
    browser.with_text("tbody tr", "not promoted")
    browser.with_text("summary", "run <b>42</b>").click()
    shown = browser.find("td details .facts").text
    version = tenant.client.get("/v1/adapters/pirate").json()["versions"][-1]

    assert (version["held"], version["provenance"]["run"]) == (True, "run <b>42</b>")
    assert {"pirate@1", tenant.key_id} <= set(shown.split("\n"))
