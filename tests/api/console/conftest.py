"""Marks every test here as one of `make test-browser`, and gives them one gateway and one browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.console.browser import Browser, chromium
from tests.api.console.console_server import ConsoleServer, ConsoleTenant, console_server
from tests.sessions.tokenizer_and_templates import THINKING

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def one_browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def server(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """Starts after the browser, so that a machine without one starts nothing."""
    with console_server(tmp_path_factory.mktemp("console") / "gateway") as server:
        yield server


@pytest.fixture(scope="session")
def fleet(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A gateway over two engines that promises first tokens sooner than they come."""
    objectives = "default.ttft_ms=5,default.target=0.9"
    with console_server(tmp_path_factory.mktemp("fleet") / "gateway", engines=2, objectives=objectives) as server:
        for model in server.models:
            model.first_token_s = 0.03
        yield server


@pytest.fixture(scope="session")
def thinker(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A gateway whose model reasons before it answers."""
    with console_server(tmp_path_factory.mktemp("thinker") / "gateway", template=THINKING) as server:
        server.model.text = "<think>\nLet me look <b>closer</b>.\n</think>\n\nIt is sunny."
        yield server


@pytest.fixture
def browser(one_browser: Browser, server: ConsoleServer) -> Iterator[Browser]:
    """The browser with a window of a laptop. At the end its console must have no error, such as a broken policy."""
    one_browser.resize(1280, 860)
    one_browser.complaints()
    model = server.model
    model.refusal, model.replies, model.cached_shares, model.miss_reason = None, (), None, None
    yield one_browser
    assert one_browser.complaints() == []


@pytest.fixture
def tenant(server: ConsoleServer) -> ConsoleTenant:
    return server.tenant()
