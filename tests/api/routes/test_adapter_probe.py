"""Tests of an upload that the engine tries before it is stored."""

import pytest

from graftwork.platform.errors import GraftworkError, Unavailable, ValidationFailed
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(ValidationFailed("the delta differs", param="weights"), 422), (Unavailable("no engine answers"), 503)],
)
async def test_nothing_is_stored_that_the_engine_refuses(
    gateway: Gateway, tenant: TestTenant, refusal: GraftworkError, status: int
) -> None:
    """The client gets the engine's message, and no adapter is stored."""
    gateway.engine.probe_refusal = refusal

    answer = await tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=adapter_upload())

    assert (answer.status_code, answer.json()["error"]["message"]) == (status, refusal.message)
    assert (await tenant.client.get("/v1/adapters")).json()["data"] == []
    assert not [*gateway.resources.server.settings.data_dir.glob("artifacts/sha256/*/*")]


async def test_the_engine_tries_what_is_new(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine tries each new digest once, before the upload is answered."""
    body = await tenant.push_adapter()
    await tenant.push_adapter("parrot")

    assert gateway.engine.probed == [body["versions"][0]["digest"]]
