"""Tests of a tenant's adapters in the browser: upload, refusal, versions, aliases, canary."""

from pathlib import Path

import pytest

from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.in_process_gateway import adapter_upload

LARGE_BYTES = 16_000_000


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The paths of an adapter's two files."""
    (tmp_path / "adapter_config.json").write_bytes(config_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(3)))
    return str(tmp_path / "adapter_config.json"), str(tmp_path / "adapter_model.safetensors")


def push(tenant: ConsoleTenant, name: str, *seeds: int) -> None:
    for seed in seeds:
        tenant.client.post("/v1/adapters", data={"name": name}, files=adapter_upload(seed)).raise_for_status()


def test_an_adapter_is_uploaded(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, files: tuple[str, str]
) -> None:
    """The upload ends on the page of the adapter, whose version is ready."""
    browser.sign_in(server.url, tenant.key, "adapters/upload")
    browser.fill("Name", "pirate")
    browser.field("adapter_config.json").send_keys(files[0])
    browser.field("adapter_model.safetensors").send_keys(files[1])
    browser.press("Upload")
    browser.heading("pirate")

    assert browser.with_text("tbody tr", "version 1")
    assert tenant.client.get("/v1/adapters/pirate").json()["versions"][0]["status"] == "ready"


def test_a_refused_upload_names_the_tensor(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, files: tuple[str, str]
) -> None:
    """The refusal of a file with a wrong tensor names the tensor, and what was typed stays."""
    found = tensors(3)
    name, wrong = next(iter(found.items()))
    Path(files[1]).write_bytes(weights_bytes({**found, name: wrong[..., :-1]}))
    browser.sign_in(server.url, tenant.key, "adapters/upload")
    browser.fill("Name", "pirate")
    browser.field("adapter_config.json").send_keys(files[0])
    browser.field("adapter_model.safetensors").send_keys(files[1])
    browser.press("Upload")
    said = browser.find(".error").text

    assert name.removesuffix(".weight").rpartition(".lora")[0] in said
    assert browser.field("Name").get_property("value") == "pirate"
    assert tenant.client.get("/v1/adapters").json()["data"] == []


def test_an_upload_shows_its_progress(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, files: tuple[str, str]
) -> None:
    """Over a slow line the page says which part of the file is sent, then that the server checks it, and what it says."""
    Path(files[1]).write_bytes(bytes(LARGE_BYTES))
    browser.sign_in(server.url, tenant.key, "adapters/upload")
    browser.fill("Name", "slow")
    browser.field("adapter_config.json").send_keys(files[0])
    browser.field("adapter_model.safetensors").send_keys(files[1])
    browser.run(
        """
        window.noted = [];
        const note = document.querySelector("form [role=status]");
        new MutationObserver(() => window.noted.push(note.textContent)).observe(note, {childList: true});
        """
    )
    line = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": LARGE_BYTES / 2}
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", line)
    try:
        browser.press("Upload")
        browser.find("form .error")
    finally:
        browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**line, "uploadThroughput": -1})
    noted = browser.run("return window.noted")

    assert any(" % of 16 MB sent" in one for one in noted), noted
    assert any("checks the tensors" in one for one in noted), noted


def test_aliases_and_a_canary(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """An alias selects one version, then divides requests between two, then goes."""
    push(tenant, "pirate", 1, 2)
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("New alias")
    browser.fill("Alias", "prod")
    browser.press("Save")
    browser.with_text("tbody tr", "fixed")
    browser.press("Change prod")
    browser.field("Kind").send_keys("Divide")
    browser.fill("version 1", "9")
    browser.fill("version 2", "1")
    browser.press("Save")
    browser.with_text("tbody tr", "90 % version 1")
    assert tenant.client.get("/v1/adapters/pirate").json()["aliases"] == {"prod": {"weights": {"1": 9, "2": 1}}}
    browser.press("Remove prod")
    browser.press("Remove")
    browser.with_text(".card", "No alias yet")


def test_a_version_in_use_is_not_deleted(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Deleting a version that an alias selects shows the server's reason; another one goes."""
    push(tenant, "pirate", 1, 2)
    tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1}).raise_for_status()
    browser.sign_in(server.url, tenant.key, "adapters/name/pirate")
    browser.press("Delete version 1")
    browser.press("Delete")
    browser.with_text("dialog .error", "prod")
    browser.press("Cancel")
    browser.press("Delete version 2")
    browser.press("Delete")

    browser.wait(lambda: len(tenant.client.get("/v1/adapters/pirate").json()["versions"]) == 1)


def test_the_list_of_adapters(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The list shows each adapter with its versions, and leads to its page."""
    push(tenant, "pirate", 1)
    push(tenant, "terse", 2)
    browser.sign_in(server.url, tenant.key, "adapters")
    browser.press("terse")

    browser.heading("terse")
