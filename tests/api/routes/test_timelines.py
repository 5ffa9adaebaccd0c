"""Tests of the timelines of requests, over a fake engine."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from tests.api.in_process_gateway import Gateway, TestTenant, chat

STAGES = ["authenticate", "body", "prepare", "encode", "quota", "start", "queue", "prefill", "decode", "finish"]


async def timeline(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    found = await client.get(f"/v1/requests/{request_id}/timeline")
    assert found.status_code == 200, found.text
    body: dict[str, Any] = found.json()
    return body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_has_a_timeline(tenant: TestTenant, stream: bool) -> None:
    """The timeline of a chat has all stages, the sender, the model and the tokens."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=stream))
    found = await timeline(tenant.client, answer.headers["x-request-id"])

    assert [stage["name"] for stage in found["stages"]] == STAGES
    assert (found["status"], found["http_status"], found["traced"]) == ("completed", 200, False)
    assert (found["tenant_id"], found["model"], found["adapter"]) == (tenant.id, "tiny", None)
    (generation,) = found["generations"]
    assert generation["prompt"]["recomputed"] > 0
    assert generation["completion_tokens"] > 0
    assert generation["engines"] == []


async def test_an_adapter_is_named_with_its_version(tenant: TestTenant) -> None:
    """The timeline names the version that has answered."""
    await tenant.push_adapter("pirate")
    answer = await tenant.client.post("/v1/chat/completions", json=chat() | {"model": "pirate"})

    assert (await timeline(tenant.client, answer.headers["x-request-id"]))["adapter"] == "pirate@1"


async def test_a_turn_is_found_by_both_ids(tenant: TestTenant) -> None:
    """The timeline of a turn has its session, and is found by the id of the request and by that of the turn."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()
    answer = await tenant.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Hello"})
    request_id, turn_id = answer.headers["x-request-id"], answer.json()["id"]

    found = await timeline(tenant.client, turn_id)

    assert found == await timeline(tenant.client, request_id)
    assert (found["id"], found["turn_id"], found["session_id"]) == (request_id, turn_id, session["id"])
    assert found["status"] == "completed"


async def test_a_request_in_the_queue_is_running(gateway: Gateway, tenant: TestTenant) -> None:
    """While the engine works, the timeline says so, and its last stage is the one under way."""
    gateway.engine.holds_queue = True
    headers = {"x-request-id": "mine"}
    asking = asyncio.create_task(tenant.client.post("/v1/chat/completions", json=chat(), headers=headers))
    await gateway.engine.held.wait()

    found = await timeline(tenant.client, "mine")
    gateway.engine.release.set()
    await asking

    assert (found["status"], found["stages"][-1]["name"]) == ("running", "queue")
    assert (await timeline(tenant.client, "mine"))["status"] == "completed"


async def test_another_tenants_request_is_unknown(gateway: Gateway, tenant: TestTenant) -> None:
    """By each of its ids, another tenant's request gets the answer of one that never was; the operator sees it."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "order-17"})
    own_id = answer.headers["x-graftwork-request-id"]
    other = await gateway.tenant("Globex")

    for request_id in (own_id, "order-17"):
        found = await other.client.get(f"/v1/requests/{request_id}/timeline")
        never = await other.client.get(f"/v1/requests/{'x' * len(request_id)}/timeline")
        assert (found.status_code, never.status_code) == (404, 404)
        assert found.text.replace(request_id, "?") == never.text.replace("x" * len(request_id), "?")
        assert (await tenant.client.get(f"/v1/requests/{request_id}/timeline")).status_code == 200
    assert (await gateway.admin.get(f"/v1/admin/requests/{own_id}/timeline")).json()["tenant_id"] == tenant.id
    assert (await tenant.client.get(f"/v1/admin/requests/{own_id}/timeline")).status_code == 403


async def test_a_refused_request_shows_where_it_ended(tenant: TestTenant) -> None:
    """A prompt that is too long ends in the stage that encodes it; nothing was generated."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat("word " * 5000))
    found = await timeline(tenant.client, answer.headers["x-request-id"])

    assert (found["status"], found["http_status"], found["generations"]) == ("answered", 400, [])
    assert found["stages"][-1]["name"] == "encode"


async def test_other_requests_have_no_timeline(tenant: TestTenant) -> None:
    """A list is not kept: only requests that begin work of the engine are."""
    answer = await tenant.client.get("/v1/models")

    found = await tenant.client.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "timeline_not_found")


async def test_the_clients_id_is_repeated_and_never_billed(gateway: Gateway, tenant: TestTenant) -> None:
    """Two requests with one client's id have that id in their answers, and are both billed."""
    headers = {"x-request-id": "order-17"}
    answers = [await tenant.client.post("/v1/chat/completions", json=chat(), headers=headers) for _ in range(2)]

    assert {answer.headers["x-request-id"] for answer in answers} == {"order-17"}
    assert len({answer.headers["x-graftwork-request-id"] for answer in answers}) == 2
    assert len({answer.json()["id"] for answer in answers}) == 2
    await gateway.resources.inference.accounting.backlog.flush()
    assert (await tenant.usage())[0]["requests"] == 2


async def test_an_id_that_is_not_well_formed_is_not_repeated(tenant: TestTenant) -> None:
    """A client cannot put what it likes into headers and logs."""
    answer = await tenant.client.get("/v1/models", headers={"x-request-id": "a b<script>"})

    assert answer.headers["x-request-id"].startswith("req_")
    assert "x-graftwork-request-id" not in answer.headers


async def test_the_trace_of_the_client_is_in_the_answer_and_in_errors(tenant: TestTenant) -> None:
    """Answers and errors have the trace id of the client's traceparent, or a new one."""
    parent = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    answer = await tenant.client.get("/v1/models", headers=parent)
    error = await tenant.client.get("/v1/adapters/none", headers=parent)
    other = await tenant.client.get("/v1/models")

    for one in (answer, error):
        assert one.headers["x-graftwork-trace-id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert len(other.headers["x-graftwork-trace-id"]) == 32


async def test_a_wrong_trace_header_is_refused(tenant: TestTenant) -> None:
    """The error names the header."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"x-graftwork-trace": "yes"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-graftwork-trace")


async def test_a_traced_stream_times_its_text_and_its_writes(gateway: Gateway, tenant: TestTenant) -> None:
    """A traced request asks the engine for its steps, and counts each call of the detokeniser and each write."""
    headers = {"x-graftwork-trace": "1"}
    answer = await tenant.client.post("/v1/chat/completions", json=chat(stream=True), headers=headers)
    found = await timeline(tenant.client, answer.headers["x-request-id"])

    assert [request.traced for request in gateway.engine.requests] == [True]
    assert found["traced"]
    assert found["generations"][0]["detokenise_calls"] == found["generations"][0]["completion_tokens"]
    assert found["writes"] > found["generations"][0]["completion_tokens"] - 2


async def test_the_line_of_a_request_says_who_what_and_how_long(
    tenant: TestTenant, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log names tenant, key, model, adapter, tokens by tier and milliseconds by stage, and no text."""
    caplog.set_level(logging.INFO, logger="graftwork")
    await tenant.push_adapter("pirate")
    answer = await tenant.client.post("/v1/chat/completions", json=chat("my canary phrase") | {"model": "pirate"})

    (line,) = [
        vars(record)
        for record in caplog.records
        if record.getMessage() == "request" and vars(record)["request_id"] == answer.headers["x-request-id"]
    ]
    assert (line["tenant_id"], line["model"], line["adapter"], line["status"]) == (tenant.id, "pirate", "pirate@1", 200)
    assert line["key_id"].startswith("key_")
    assert {*line["tokens"]} == {"device", "host", "disk", "recomputed", "completion"}
    assert [*line["stages_ms"]] == STAGES
    assert "canary" not in str(line)
