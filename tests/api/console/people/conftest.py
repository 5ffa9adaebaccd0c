"""Gives the tests of people one gateway with an identity provider."""

from collections.abc import Iterator

import pytest

from tests.api.console.browser import Browser
from tests.api.console.people.office import Office, open_office


@pytest.fixture(scope="session")
def office(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """Starts after the browser, so that a machine without one starts nothing."""
    with open_office(tmp_path_factory.mktemp("people") / "gateway") as office:
        yield office
