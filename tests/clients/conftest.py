"""Marks every test here as one of `make test-clients`, and gives it a gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.scripted_gateway import ScriptedGateway, scripted_gateway

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.clients)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1800))  # the first test of an environment installs it


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[ScriptedGateway]:
    """A gateway with a long context and one tenant."""
    async with scripted_gateway(tmp_path / "gateway") as gateway:
        yield gateway


@pytest.fixture
def variables(gateway: ScriptedGateway, tmp_path: Path) -> dict[str, str]:
    """The environment of a client: where the gateway is, and an empty home folder."""
    home = tmp_path / "home"
    home.mkdir()
    return {"HOME": str(home), **gateway.environment}
