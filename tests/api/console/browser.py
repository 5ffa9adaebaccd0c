"""Headless Chromium over WebDriver, for the console's tests: finds elements by what people and screen readers see."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException, TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

Result = TypeVar("Result")

PATIENCE_S = 20
"""The most seconds that a test waits for what the page must show."""


class Browser:
    """One browser window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Opens an address anew, without cookies and without what a page has kept."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.driver.get(url)

    def sign_in(self, url: str, key: str, page: str = "") -> None:
        """Opens a page of the console with a key, and waits until the page has its heading."""
        self.open(f"{url}/console#/{page}")
        self.type_key(key)
        self.find("h1")

    def sign_in_person(self, url: str, ticket: str, page: str = "") -> None:
        """The same for a person, by the ticket that the console's cookie holds."""
        self.open(f"{url}/console/session")
        self.driver.add_cookie({"name": "graftwork_console", "value": ticket, "httpOnly": True, "sameSite": "Strict"})
        self.driver.get(f"{url}/console#/{page}")
        self.find("h1")

    def type_key(self, key: str) -> None:
        """Types a key into the dialog of the sign-in."""
        self.find("dialog.sign-in input[name=key]").send_keys(key, Keys.ENTER)
        self.wait(lambda: not self.all("dialog.sign-in"))

    def go(self, page: str, heading: str) -> None:
        """Goes to another page of the console, and waits for its heading."""
        self.driver.execute_script("location.hash = arguments[0]", f"#/{page}")
        self.heading(heading)

    def heading(self, text: str) -> WebElement:
        """Waits until the page's heading contains the text."""
        return self.with_text("h1", text)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def find_all_shown(self, selector: str) -> list[WebElement]:
        return [one for one in self.all(selector) if one.is_displayed()]

    def find(self, selector: str) -> WebElement:
        """Waits for an element that is shown."""
        return self._until(lambda: next((one for one in self.all(selector) if one.is_displayed()), None), selector)

    def with_text(self, selector: str, text: str) -> WebElement:
        """Waits for an element that is shown and contains the text."""

        def found() -> WebElement | None:
            return next((one for one in self.all(selector) if text in one.text and one.is_displayed()), None)

        return self._until(found, f"{selector} with {text!r}")

    def button(self, name: str) -> WebElement:
        """Waits for a button or a link with this name, in the open dialog if there is one."""
        path = f"[normalize-space(.)={name!r} or @aria-label={name!r}]"

        def found() -> WebElement | None:
            inside = "//dialog[@open]" if self.all("dialog[open]") else ""  # it may close while its act is under way
            elements = self.driver.find_elements(By.XPATH, f"{inside}//button{path} | {inside}//a{path}")
            return next((one for one in elements if one.is_displayed() and one.is_enabled()), None)

        return self._until(found, f"the button {name!r}")

    def press(self, name: str) -> None:
        """Presses a button or a link with this name."""

        def press() -> None:
            button = self.button(name)
            self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
            button.click()

        self._retried(press)

    def fill(self, label: str, value: str) -> WebElement:
        """Types into the field with this label."""
        field = self.field(label)
        field.clear()
        field.send_keys(value)
        return field

    def field(self, label: str) -> WebElement:
        """Waits for the field with this label."""

        def found() -> WebElement | None:
            for one in self.all("label"):
                if one.text.strip() == label and one.is_displayed():
                    return self.driver.find_element(By.ID, one.get_attribute("for") or "")
            return None

        return self._until(found, f"the field {label!r}")

    def text(self) -> str:
        """All text of the page's content."""
        return str(self.driver.execute_script("return document.getElementById('main').innerText"))

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs a function body in the page, which may use `await`, and returns its result."""
        wrapped = f"const done = arguments[arguments.length - 1]; (async () => {{ {script} }})().then(done, (error) => done(String(error)))"
        return self.driver.execute_async_script(wrapped, *arguments)

    def wait(self, condition: Callable[[], Result | None]) -> Result:
        return self._until(condition, "what the test waits for")

    def complaints(self) -> list[str]:
        """What the browser's console says of errors, such as a broken policy. Failed requests are not errors here."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [one["message"] for one in entries if one["level"] == "SEVERE" and one["source"] != "network"]

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the page, and the colours that its user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def shoot(self, path: Path) -> None:
        """Writes a picture of the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(path))

    def _until(self, condition: Callable[[], Result | None], what: str) -> Result:
        ignored = (NoSuchElementException, StaleElementReferenceException)
        waiting = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05, ignored_exceptions=ignored)
        try:
            found = waiting.until(lambda _: condition())
        except TimeoutException as error:
            raise AssertionError(f"The page does not show {what}: {self.text()[:2000]}") from error
        assert found is not None
        return found

    def _retried(self, act: Callable[[], None]) -> None:
        """Acts on an element that a live page may replace meanwhile."""
        for _ in range(3):
            try:
                act()
                return
            except StaleElementReferenceException:
                continue
        act()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Runs the machine's own Chromium without a window. Skips the test where there is none."""
    program, service = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or service is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = program
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(service))
    try:
        driver.set_script_timeout(PATIENCE_S)
        yield Browser(driver)
    finally:
        driver.quit()
