"""Tests of requests with several adapters."""

from typing import Any

import pytest

from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat


async def test_a_mixture_reaches_the_engine_with_its_weights(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine gets both versions with their weights, and usage names them."""
    await tenant.push_adapter()
    both = (await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))).json()["versions"]
    parts = [{"model": "pirate@1", "weight": 0.25}, {"model": "pirate@2", "weight": -1.5}]

    answer = await tenant.client.post("/v1/chat/completions", json=chat() | {"adapters": parts})

    assert answer.status_code == 200
    used = {use.digest: use.weight for use in gateway.engine.requests[0].adapters}
    assert used == {both[0]["digest"]: 0.25, both[1]["digest"]: -1.5}
    assert answer.headers["x-graftwork-model"] == "pirate@1*0.25+pirate@2*-1.5"
    usage = (await tenant.client.get("/v1/usage", params={"group_by": "adapter"})).json()
    assert "pirate@1*0.25+pirate@2*-1.5" in str(usage)


async def test_two_names_of_one_adapter_are_one_part(gateway: Gateway, tenant: TestTenant) -> None:
    """Two names of one adapter become one part with the sum of their weights."""
    await tenant.push_adapter()
    parts = [{"model": "pirate", "weight": 0.5}, {"model": "pirate@1", "weight": 0.25}]

    await tenant.client.post("/v1/chat/completions", json=chat() | {"adapters": parts})

    assert [use.weight for use in gateway.engine.requests[0].adapters] == [0.75]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"adapters": []}, 400, "adapters"),
        ({"adapters": [{"model": "pirate"}] * 5}, 400, "adapters"),
        ({"adapters": [{"model": "pirate", "weight": 1e9}]}, 400, "adapters[0].weight"),
        ({"adapters": [{"model": "pirate", "wieght": 1.0}]}, 400, "adapters[0].wieght"),  # codespell:ignore
        ({"adapters": [{"model": "nobody"}]}, 404, None),
        ({"adapters": [{"model": "BASE"}]}, 400, "adapters[0].model"),
        ({"adapters": [{"model": "pirate"}], "model": "pirate"}, 400, "model"),
    ],
)
async def test_what_is_no_mixture_is_refused(
    tenant: TestTenant, change: dict[str, Any], status: int, param: str | None
) -> None:
    """An empty, too long or malformed mixture, or one with an unknown or the base model, is refused."""
    await tenant.push_adapter()
    body = chat() | change
    for part in body["adapters"]:
        part["model"] = chat()["model"] if part["model"] == "BASE" else part["model"]

    answer = await tenant.client.post("/v1/chat/completions", json=body)

    assert answer.status_code == status
    if param is not None:
        assert answer.json()["error"]["param"] == param
