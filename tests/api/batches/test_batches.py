"""Tests of batches in OpenAI's form: their lines, their files, their ends, and what they cost."""

import asyncio

import pytest

from graftwork.engine.core.deadlines import line_of
from graftwork.platform.batches.batch import COMPLETION_WINDOW_S
from graftwork.platform.errors import InternalFailure, Unavailable
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from tests.api.batches.conftest import Batching, GatedEngine, create, get, jsonl, line, lines_of, until, upload
from tests.api.in_process_gateway import ADMIN_KEY, TestTenant


def engine_of(batching: Batching) -> GatedEngine:
    engine = batching.gateway.engine
    assert isinstance(engine, GatedEngine)
    return engine


async def test_each_line_is_answered_as_by_its_route(batching: Batching, tenant: TestTenant) -> None:
    """The output has the body that the route answers, but for its ids, time and tier; a wrong body is an error line."""
    alone = (await tenant.client.post("/v1/chat/completions", json=line("x")["body"])).json()
    refused = await tenant.client.post("/v1/chat/completions", json=line("x", temperature=9)["body"])
    batch = await create(tenant, [line("a"), line("wrong", temperature=9), line("b", max_tokens=2)])

    await batching.run()

    ended = await get(tenant, batch)
    assert (ended["status"], ended["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    output = await lines_of(tenant, ended["output_file_id"])
    errors = await lines_of(tenant, ended["error_file_id"])
    assert [one["custom_id"] for one in output] == ["a", "b"]
    same = {"choices": alone["choices"], "model": "tiny", "object": "chat.completion", "service_tier": "flex"}
    assert {name: output[0]["response"]["body"][name] for name in same} == same
    assert output[1]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert [one["response"]["body"] for one in errors] == [refused.json()]
    assert errors[0]["response"]["status_code"] == refused.status_code == 400


async def test_text_completions(batching: Batching, tenant: TestTenant) -> None:
    """A batch of text completions has the route's answers too, and a stream is refused."""
    url = "/v1/completions"
    alone = (await tenant.client.post(url, json={"model": "tiny", "prompt": "x"})).json()
    lines = [{"custom_id": "a", "method": "POST", "url": url, "body": {"model": "tiny", "prompt": "x"}}]
    lines.append(lines[0] | {"custom_id": "b", "body": {"model": "tiny", "prompt": "x", "stream": True}})
    batch = await create(tenant, lines, url)

    await batching.run()

    ended = await get(tenant, batch)
    (answered,) = await lines_of(tenant, ended["output_file_id"])
    (streamed,) = await lines_of(tenant, ended["error_file_id"])
    assert answered["response"]["body"]["choices"] == alone["choices"]
    assert streamed["response"]["body"]["error"]["param"] == "stream"


async def test_embeddings(batching: Batching, tenant: TestTenant) -> None:
    """A batch of embeddings has the route's vectors and costs the same tokens, and a wrong line has the route's error."""
    url = "/v1/embeddings"
    bodies = [{"model": "tiny", "input": ["one", "two"]}, {"model": "tiny", "input": "one", "dimensions": 10**6}]
    alone = [await tenant.client.post(url, json=body) for body in bodies]
    before = len(batching.gateway.engine.requests)
    lines = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    batch = await create(tenant, lines, url)

    await batching.run()

    ended = await get(tenant, batch)
    (answered,) = await lines_of(tenant, ended["output_file_id"])
    (refused,) = await lines_of(tenant, ended["error_file_id"])
    assert answered["response"]["body"] == alone[0].json() | {"service_tier": "flex"}
    assert refused["response"]["body"] == alone[1].json()
    assert refused["response"]["status_code"] == alone[1].status_code == 400
    assert ended["usage"]["input_tokens"] == alone[0].json()["usage"]["prompt_tokens"] > 0
    assert {request.tier.value for request in batching.gateway.engine.requests[before:]} == {"flex"}


async def test_a_batch_costs_what_its_lines_cost(batching: Batching, tenant: TestTenant) -> None:
    """Each answered line has one usage record of the tier flex, and the batch shows their sum."""
    batch = await create(tenant, [line("a"), line("wrong", temperature=9), line("b")])

    await batching.run()

    (by_tier,) = await tenant.usage("tier")
    used = (await get(tenant, batch))["usage"]
    assert (by_tier["group"], by_tier["requests"]) == ("flex", 2)
    assert by_tier["prompt_tokens"] == used["input_tokens"] > 0
    assert by_tier["completion_tokens"] == used["output_tokens"] > 0
    engine = batching.gateway.engine
    assert [request.tier.value for request in engine.requests] == ["flex", "flex"]
    assert [newcomer.line for newcomer in engine.newcomers] == [line_of(request) for request in engine.requests]
    assert all(request.request_id.startswith(batch["id"]) for request in batching.gateway.engine.requests)


async def test_a_wrong_input_fails_with_each_line(batching: Batching, tenant: TestTenant) -> None:
    """A batch whose input is wrong answers nothing, and names the lines."""
    lines = [line("a"), line("a"), line("b", url="/v1/completions")]
    file_id = await upload(tenant, jsonl(lines) + b"{\n")
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await tenant.client.post("/v1/batches", json=body)).json()

    await batching.run()

    ended = await get(tenant, batch)
    found = [(one["line"], one["code"]) for one in ended["errors"]["data"]]
    assert ended["status"] == "failed"
    assert found == [(2, "duplicate_custom_id"), (3, "mismatched_endpoint"), (4, "invalid_json_line")]
    assert batching.gateway.engine.requests == []


async def test_cancel_keeps_what_was_answered(batching: Batching, tenant: TestTenant) -> None:
    """A cancelled batch still answers the lines that run, and lists the others as errors."""
    engine = engine_of(batching)
    engine.is_open = False
    batch = await create(tenant, [line(f"{number}") for number in range(8)])
    await batching.runner.tick()
    await until(lambda: engine.num_waiting == 4)  # the most of a tenant

    cancelled = await tenant.client.post(f"/v1/batches/{batch['id']}/cancel")
    await batching.runner.tick()
    engine.open()
    await batching.runner.drained()

    ended = await get(tenant, batch)
    output, errors = [await lines_of(tenant, ended[name]) for name in ("output_file_id", "error_file_id")]
    assert (cancelled.json()["status"], ended["status"]) == ("cancelling", "cancelled")
    assert (len(output), len(errors)) == (4, 4)
    assert {one["custom_id"] for one in (*output, *errors)} == {f"{number}" for number in range(8)}
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert ended["request_counts"] == {"total": 8, "completed": 4, "failed": 4}
    assert (await tenant.client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 409


async def test_a_batch_expires_with_its_window(batching: Batching, tenant: TestTenant) -> None:
    """After 24 hours a batch ends with what it has, and the rest is listed as expired."""
    engine = engine_of(batching)
    engine.is_open = False
    batch = await create(tenant, [line(f"{number}") for number in range(6)])
    await batching.runner.tick()
    await until(lambda: engine.num_waiting == 4)

    batching.gateway.clock.advance(COMPLETION_WINDOW_S)
    await batching.runner.tick()
    engine.open()
    await batching.runner.drained()

    ended = await get(tenant, batch)
    errors = await lines_of(tenant, ended["error_file_id"])
    assert ended["status"] == "expired"
    assert ended["expired_at"] is not None
    assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 2


async def test_a_batch_leaves_half_of_a_tenants_requests_to_others(batching: Batching, tenant: TestTenant) -> None:
    """With a limit of two concurrent requests, a batch runs one line at a time, and a live request fits beside it."""
    engine = engine_of(batching)
    await batching.gateway.resources.account.tenancy.limits.set(
        LimitOwner.tenant(tenant.id), Quota(max_concurrent_requests=2)
    )
    engine.is_open = False
    batch = await create(tenant, [line(f"{number}") for number in range(3)])
    await batching.runner.tick()
    await until(lambda: engine.num_waiting == 1)

    live = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=line("x")["body"]))
    await until(lambda: engine.num_waiting == 2)
    engine.open()
    await batching.runner.drained()

    assert (await live).status_code == 200
    assert engine.most_waiting == 2
    assert (await get(tenant, batch))["status"] == "completed"


async def test_a_line_waits_for_the_engine(batching: Batching, tenant: TestTenant) -> None:
    """While the engine is away, no line fails; when it is back, each is answered once."""
    engine = engine_of(batching)
    engine.refusal = Unavailable("No engine answers at present.", retry_after_s=0.0)
    batch = await create(tenant, [line("a"), line("b")])
    await batching.runner.tick()
    await until(lambda: len(engine.requests) >= 6)

    engine.refusal = None
    await batching.runner.drained()

    ended = await get(tenant, batch)
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 2)
    assert (await tenant.usage("tier"))[0]["requests"] == 2


async def test_a_line_that_breaks_the_server_does_not_stop_the_others(batching: Batching, tenant: TestTenant) -> None:
    """A line that fails three times by the server's fault gets the error as its answer, and costs nothing."""
    engine = engine_of(batching)
    engine.breaks_after, engine.breakage = 1, InternalFailure("a bug")
    batch = await create(tenant, [line("a")])
    await batching.runner.tick()
    await until(lambda: len(engine.requests) >= 1)

    await batching.runner.drained()

    ended = await get(tenant, batch)
    (failed,) = await lines_of(tenant, ended["error_file_id"])
    assert len(engine.requests) == 3
    assert failed["response"]["status_code"] == 500
    assert await tenant.usage("tier") == []


@pytest.mark.parametrize("how", ["rotate", "revoke"])
async def test_a_batch_follows_its_key(batching: Batching, tenant: TestTenant, how: str) -> None:
    """A batch goes on under the key that a rotation has made, and fails if its key was revoked."""
    batch = await create(tenant, [line("a"), line("b")])
    admin = batching.gateway.client(ADMIN_KEY)
    path = f"/v1/admin/tenants/{tenant.id}/keys"
    (key,) = (await admin.get(path)).json()["data"]
    if how == "rotate":
        changed = await admin.post(f"{path}/{key['id']}/rotate", json={})
    else:
        changed = await admin.delete(f"{path}/{key['id']}")
    assert changed.status_code == 200, changed.text
    _, other = await batching.gateway.resources.account.tenancy.create_key(tenant.id, "other")

    await batching.run()

    seen = (await batching.gateway.client(other).get(f"/v1/batches/{batch['id']}")).json()
    assert seen["status"] == ("completed" if how == "rotate" else "failed")
    if how == "revoke":
        assert [one["code"] for one in seen["errors"]["data"]] == ["access_ended"]
        assert seen["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        assert batching.gateway.engine.requests == []


async def test_a_suspended_tenants_batch_waits(batching: Batching, tenant: TestTenant) -> None:
    """A batch of a suspended tenant answers nothing, and goes on when the tenant is resumed."""
    batch = await create(tenant, [line("a")])
    tenancy = batching.gateway.resources.account.tenancy
    await tenancy.suspend_tenant(tenant.id)
    await batching.runner.tick()
    await batching.runner.close()
    before = len(batching.gateway.engine.requests)
    await tenancy.resume_tenant(tenant.id)
    batching.gateway.clock.advance(60)

    await batching.run()

    assert before == 0
    assert (await get(tenant, batch))["status"] == "completed"
