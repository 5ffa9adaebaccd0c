"""A gateway in this process over a fake engine, and an SDK client of one tenant."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from graftwork.api.sdk.client import AsyncGraftwork
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, gateway_settings, open_gateway, write_model_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def gateway(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Gateway]:
    async with open_gateway(gateway_settings(tmp_path, tiny_model)) as gateway:
        yield gateway


class LossyTransport(httpx.AsyncBaseTransport):
    """Sends requests to the gateway, and loses its next `losses` answers."""

    def __init__(self, gateway: Gateway, losses: int = 0) -> None:
        self._transport = httpx.ASGITransport(app=gateway.app)
        self.losses = losses

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        if self.losses:
            self.losses -= 1
            raise httpx.ReadError("lost")
        return response


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncGraftwork]:
    """With a new tenant's key and the operator's."""
    tenant = await gateway.tenant()
    transport = LossyTransport(gateway)
    async with AsyncGraftwork("http://gateway.test", tenant.key, ADMIN_KEY, transport=transport) as client:
        yield client
