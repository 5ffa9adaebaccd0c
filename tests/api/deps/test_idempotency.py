"""Tests of `Idempotency-Key`: a POST that is sent twice runs once."""

import asyncio

import pytest

from graftwork.platform.errors import CapacityContended, Unavailable
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, session_frames

KEY = {"idempotency-key": "k1"}


async def test_same_request(tenant: TestTenant) -> None:
    """The same key and body get the first answer, and nothing is created twice."""
    first = await tenant.client.post("/v1/sessions", json={"model": "tiny"}, headers=KEY)
    again = await tenant.client.post("/v1/sessions", json={"model": "tiny"}, headers=KEY)

    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert len((await tenant.client.get("/v1/sessions")).json()["data"]) == 1


async def test_other_body(tenant: TestTenant) -> None:
    """The same key with another body is a conflict that must not be retried."""
    await tenant.client.post("/v1/sessions", json={"model": "tiny"}, headers=KEY)

    answer = await tenant.client.post("/v1/sessions", json={"model": "tiny", "metadata": {}}, headers=KEY)

    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


async def test_keys_belong_to_tenants(gateway: Gateway, tenant: TestTenant) -> None:
    """Two tenants may use the same key, and each gets its own answer."""
    other = await gateway.tenant("Other")

    mine = await tenant.client.post("/v1/sessions", json={"model": "tiny"}, headers=KEY)
    theirs = await other.client.post("/v1/sessions", json={"model": "tiny"}, headers=KEY)

    assert theirs.status_code == 201
    assert mine.json()["id"] != theirs.json()["id"]


async def test_refused_requests_free_the_key(tenant: TestTenant) -> None:
    """A refused request is not stored."""
    refused = await tenant.client.post("/v1/sessions", json={"model": "nobody"}, headers=KEY)
    made = await tenant.client.post("/v1/sessions", json={"model": "tiny"}, headers=KEY)

    assert (refused.status_code, made.status_code) == (404, 201)


async def test_uploads(tenant: TestTenant) -> None:
    """The same upload is the same request, with any multipart boundary."""
    answers = [
        await tenant.client.post("/v1/adapters", data={"name": "a"}, files=adapter_upload(), headers=KEY)
        for _ in range(2)
    ]

    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotent-replayed"] == "true"


async def test_turns(gateway: Gateway, tenant: TestTenant) -> None:
    """A repeated turn gets the stored answer, without the engine."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path = f"/v1/sessions/{session}/turns"

    first = await tenant.client.post(path, json={"input": "x"}, headers=KEY)
    again = await tenant.client.post(path, json={"input": "x"}, headers=KEY)

    assert again.json() == first.json()
    assert len(gateway.engine.requests) == 1


async def test_streamed_turns(gateway: Gateway, tenant: TestTenant) -> None:
    """A repeated streamed turn is streamed from the store, while it runs and afterwards."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path = f"/v1/sessions/{session}/turns"
    await tenant.client.post(path, json={"input": "before"})
    gateway.engine.holds_after = 2
    body = {"input": "x", "stream": True}

    first = asyncio.create_task(tenant.client.post(path, json=body, headers=KEY))
    await gateway.engine.held.wait()
    during = asyncio.create_task(tenant.client.post(path, json=body, headers=KEY))
    gateway.engine.release.set()
    frames = [session_frames(answer.text) for answer in await asyncio.gather(first, during)]
    await tenant.client.post(path, json={"input": "after"})
    frames.append(session_frames((await tenant.client.post(path, json=body, headers=KEY)).text))

    assert frames[0][0]["event"] == "turn.created"
    assert frames[0][-1]["event"] == "turn.completed"
    assert [frame[-1] for frame in frames] == [frames[0][-1]] * 3
    assert len(gateway.engine.requests) == 3


@pytest.mark.parametrize("holds_queue", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_connection_loses_no_turn(
    gateway: Gateway, tenant: TestTenant, stream: bool, holds_queue: bool
) -> None:
    """A client that lost the connection and repeats the request follows the same turn."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path, body = f"/v1/sessions/{session}/turns", {"input": "x", "stream": stream}
    gateway.engine.holds_queue, gateway.engine.holds_after = holds_queue, 2
    lost = asyncio.create_task(tenant.client.post(path, json=body, headers=KEY))
    await gateway.engine.held.wait()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)

    during = asyncio.create_task(tenant.client.post(path, json=body, headers=KEY))
    await asyncio.sleep(0)
    gateway.engine.release.set()
    answers = [await during, await tenant.client.post(path, json=body, headers=KEY)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].text == answers[1].text
    assert "completed" in answers[0].text
    assert len(gateway.engine.requests) == 1


async def test_a_refused_turn_frees_its_key(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn that the full queue refused is started again under the same key."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path, body = f"/v1/sessions/{session}/turns", {"input": "x"}
    gateway.engine.refusal = CapacityContended("The queue is full.", retry_after_s=1)
    refused = await tenant.client.post(path, json=body, headers=KEY)
    gateway.engine.refusal = None

    answered = await tenant.client.post(path, json=body, headers=KEY)

    assert (refused.status_code, answered.status_code) == (429, 200)
    assert answered.json()["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_the_server_failed_runs_again(gateway: Gateway, tenant: TestTenant, stream: bool) -> None:
    """A turn that the engine broke off is not given again: the repeated request runs, and its answer is kept."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path, body = f"/v1/sessions/{session}/turns", {"input": "x", "stream": stream}
    gateway.engine.breaks_after, gateway.engine.breakage = 2, Unavailable("The engine stopped.")
    failed = await tenant.client.post(path, json=body, headers=KEY)
    gateway.engine.breakage = None

    answers = [await tenant.client.post(path, json=body, headers=KEY) for _ in range(2)]

    assert "no_capacity" in failed.text
    assert "completed" in answers[0].text
    assert "failed" not in answers[0].text
    assert "idempotent-replayed" not in answers[0].headers
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert answers[1].text == answers[0].text
    assert len(gateway.engine.requests) == 2


async def test_a_response_that_the_server_failed_runs_again(gateway: Gateway, tenant: TestTenant) -> None:
    """A response that the engine broke off is not given again."""
    body = {"model": "tiny", "input": "x"}
    gateway.engine.breaks_after, gateway.engine.breakage = 2, Unavailable("The engine stopped.")
    failed = await tenant.client.post("/v1/responses", json=body, headers=KEY)
    gateway.engine.breakage = None

    answered = await tenant.client.post("/v1/responses", json=body, headers=KEY)
    again = await tenant.client.post("/v1/responses", json=body, headers=KEY)

    assert failed.json()["status"] == "failed"
    assert answered.json()["status"] == "completed"
    assert again.json()["id"] == answered.json()["id"] != failed.json()["id"]
    assert len(gateway.engine.requests) == 2


async def test_a_turn_that_its_client_cancelled_is_given_again(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn that ended as its client wanted is not run again."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path, body = f"/v1/sessions/{session}/turns", {"input": "x"}
    gateway.engine.holds_after = 2
    first = asyncio.create_task(tenant.client.post(path, json=body, headers=KEY))
    await gateway.engine.held.wait()
    await tenant.client.post(f"/v1/sessions/{session}/cancel")

    again = await tenant.client.post(path, json=body, headers=KEY)

    assert (await first).json()["status"] == again.json()["status"] == "cancelled"
    assert len(gateway.engine.requests) == 1


async def test_new_keys_are_not_stored(gateway: Gateway, tenant: TestTenant) -> None:
    """An API key is created once, and only the first answer has its plaintext."""
    path = f"/v1/admin/tenants/{tenant.id}/keys"

    first = await gateway.admin.post(path, json={"name": "ci"}, headers=KEY)
    again = await gateway.admin.post(path, json={"name": "ci"}, headers=KEY)

    assert again.json() == first.json() | {"key": None}


async def test_malformed_key(tenant: TestTenant) -> None:
    """A key has 1 to 255 characters."""
    for key in ("", "x" * 256):
        answer = await tenant.client.post("/v1/sessions", json={"model": "tiny"}, headers={"idempotency-key": key})

        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "Idempotency-Key")
