"""Tests of roll-outs over HTTP, with a version that fails."""

from typing import Any

import pytest

from graftwork.adapters.registry.rollout_controller import RolloutController
from graftwork.platform.errors import Unavailable
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat

PATH = "/v1/adapters/pirate/rollouts"
STEPS = [{"weight": 50, "seconds": 60}]


@pytest.fixture
async def promoted(tenant: TestTenant) -> TestTenant:
    """A tenant whose adapter has two versions, of which `prod` leads to the first."""
    await tenant.push_adapter()
    await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))
    await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})
    return tenant


def controller_of(gateway: Gateway) -> RolloutController:
    """The gateway's controller, for a test that does not wait for the next tick."""
    account = gateway.resources.account
    outcomes = gateway.resources.inference.accounting.activity.outcomes
    database = gateway.resources.server.database
    gateway_id = gateway.resources.server.traces.gateway_id
    return RolloutController(database, account.registry.rollouts, outcomes, gateway_id, gateway.clock)


async def test_a_version_that_fails_is_rolled_back(gateway: Gateway, promoted: TestTenant) -> None:
    """A version whose requests fail is rolled back from their outcomes, and then every user has the stable version."""
    digests = [each["digest"] for each in (await promoted.client.get("/v1/adapters/pirate")).json()["versions"]]
    gateway.engine.refused_digests[digests[1]] = Unavailable(
        "The adapter's files are damaged.", code="artifact_damaged"
    )
    started = await promoted.client.post(PATH, json={"version": 2, "steps": STEPS})
    controller = controller_of(gateway)
    await controller.tick()

    async def ask_all() -> list[int]:
        bodies = [chat(model="pirate", user=f"user {number}") for number in range(40)]
        answers = [await promoted.client.post("/v1/chat/completions", json=body) for body in bodies]
        return [answer.status_code for answer in answers]

    before = await ask_all()
    await controller.tick()
    after = await ask_all()
    rollout = (await promoted.client.get(f"{PATH}/{started.json()['id']}")).json()
    audit = (await gateway.admin.get("/v1/admin/audit?limit=1")).json()["data"][0]

    assert started.status_code == 201
    assert (started.json()["state"], started.json()["stable"]) == ("running", 1)
    assert set(before) == {200, 503}
    assert set(after) == {200}
    assert rollout["state"] == "rolled_back"
    assert "error rate is 1.000" in rollout["reason"]
    canary = rollout["figures"]["2"]  # at the moment of the verdict; the gateway's own controller may be the first
    assert 0 < canary["errors"] == canary["requests"] <= before.count(503)
    assert rollout["figures"]["1"]["errors"] == 0
    assert (audit["actor"], audit["action"], audit["target"]) == (
        "rollout",
        "adapter.rollout.rolled_back",
        "pirate@prod",
    )


async def test_cancel_and_list(promoted: TestTenant) -> None:
    """A cancelled roll-out gives the alias back, cannot be cancelled twice, and is listed."""
    made = (await promoted.client.post(PATH, json={"version": 2, "steps": STEPS})).json()
    second = await promoted.client.post(PATH, json={"version": 2, "steps": STEPS})
    cancelled = await promoted.client.post(f"{PATH}/{made['id']}/cancel")
    again = await promoted.client.post(f"{PATH}/{made['id']}/cancel")
    listed = (await promoted.client.get(PATH)).json()

    assert (second.status_code, second.json()["error"]["code"]) == (409, "rollout_running")
    assert (cancelled.json()["state"], again.status_code) == ("cancelled", 409)
    assert [each["id"] for each in listed["data"]] == [made["id"]]
    assert (await promoted.client.get("/v1/adapters/pirate")).json()["aliases"] == {"prod": {"version": 1}}


async def test_bad_roll_outs(promoted: TestTenant) -> None:
    """Steps and limits out of range are a 422 that names them."""
    bad: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, "steps"),
        ({"version": 2, "steps": []}, "steps"),
        ({"version": 2, "steps": [{"weight": 0, "seconds": 1}]}, "steps[0].weight"),
        ({"version": 2, "steps": [{"weight": 100, "seconds": 1}]}, "steps[0].weight"),
        ({"version": 2, "steps": [{"weight": 10, "seconds": -1}]}, "steps[0].seconds"),
        ({"version": 2, "steps": STEPS, "limits": {"error_rate": 2}}, "limits.error_rate"),
        ({"version": 2, "steps": STEPS, "limits": {"colour": 1}}, "limits.colour"),
        ({"version": 0, "steps": STEPS}, "version"),
    ]
    for body, param in bad:
        answer = await promoted.client.post(PATH, json=body)

        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.text
