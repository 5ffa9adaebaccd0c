"""Tests of the timelines of requests, over a fake engine."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from graftwork.platform.tracing.logs import TOKEN_LOGGER
from graftwork.platform.tracing.otel_sdk import open_export
from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks

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
    await gateway.store_usage()
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat(stream=True)),
        ("completions", {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 40}),
        ("messages", chat(stream=True, max_tokens=40)),
        ("responses", {"model": "tiny", "input": "Hi", "stream": True}),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
async def test_a_traced_stream_times_its_text_and_its_writes(
    gateway: Gateway, tenant: TestTenant, path: str, body: dict[str, Any]
) -> None:
    """A traced request asks the engine for its steps, and has the time of its detokeniser and its writes, whatever its
    form: as many calls of the one as tokens, and writes that may take some tokens together.
    """
    answer = await tenant.client.post(f"/v1/{path}", json=body, headers={"x-graftwork-trace": "1"})
    found = await timeline(tenant.client, answer.headers["x-request-id"])
    (generation,) = found["generations"]

    assert [request.traced for request in gateway.engine.requests] == [True]
    assert found["traced"]
    assert generation["detokenise_calls"] == generation["completion_tokens"]
    assert {"detokenise_ms"} <= set(generation)
    assert found["writes"] > generation["completion_tokens"] / 2
    assert "write_ms" in found


async def test_an_answer_that_is_not_streamed_has_no_writes(tenant: TestTenant) -> None:
    """A traced answer that is sent whole has the time of its detokeniser, and none of writes."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"x-graftwork-trace": "1"})
    found = await timeline(tenant.client, answer.headers["x-request-id"])

    assert found["generations"][0]["detokenise_calls"] > 0
    assert not {"writes", "write_ms"} & set(found)


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


async def test_a_switched_tenant_is_traced_until_it_is_switched_off(gateway: Gateway, tenant: TestTenant) -> None:
    """From the switch on, all requests of the tenant are traced and those of others are not; then none."""
    other = await gateway.tenant("Globex")
    switched = await gateway.admin.put(f"/v1/admin/traces/{tenant.id}", json={})
    for one in (tenant, other):
        await one.client.post("/v1/chat/completions", json=chat())
    listed = (await gateway.admin.get("/v1/admin/traces")).json()["data"]
    off = await gateway.admin.delete(f"/v1/admin/traces/{tenant.id}")
    await tenant.client.post("/v1/chat/completions", json=chat())

    assert (switched.status_code, off.status_code) == (200, 200)
    assert listed == [switched.json()]
    assert [request.traced for request in gateway.engine.requests] == [True, False, False]


async def test_a_tenant_may_not_switch_traces(tenant: TestTenant) -> None:
    """A tenant's key neither reads nor sets the switches."""
    for answer in (
        await tenant.client.get("/v1/admin/traces"),
        await tenant.client.put(f"/v1/admin/traces/{tenant.id}", json={}),
        await tenant.client.delete(f"/v1/admin/traces/{tenant.id}"),
    ):
        assert answer.status_code == 403


async def test_token_ids_are_logged_for_those_who_were_switched_on(
    gateway: Gateway, tenant: TestTenant, caplog: pytest.LogCaptureFixture
) -> None:
    """The token ids of a switched session's turns are logged, without text; those of other requests never are."""
    caplog.set_level(logging.INFO, logger=TOKEN_LOGGER)
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    await gateway.admin.put(f"/v1/admin/traces/{session}", json={"token_ids": True})
    await tenant.client.post("/v1/chat/completions", json=chat("my canary phrase"))
    await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "my canary phrase"})

    (line,) = [vars(record) for record in caplog.records if record.name == TOKEN_LOGGER]
    assert line["session_id"] == session
    assert line["prompt_token_ids"] == list(gateway.engine.requests[-1].prompt_token_ids)
    assert len(line["completion_token_ids"]) > 1
    assert "canary" not in str(line)


async def test_spans_and_logs_have_no_text(
    gateway: Gateway, tenant: TestTenant, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans of a traced request with tools and stop strings, and all lines of the log, have no word of the prompt, of the
    answer or of the tools, and no token ids.
    """
    caplog.set_level(logging.DEBUG, logger="graftwork")
    exporter = InMemorySpanExporter()
    export = open_export(SimpleSpanProcessor(exporter), "gateway_1", with_gen_ai=True)
    gateway.resources.server.traces.exports.append(export.spans.export)
    gateway.engine.text = "the answer is xylophone"
    tool = {"type": "function", "function": {"name": "canary_tool", "parameters": {"type": "object"}}}
    body = chat("my canary phrase", stream=True, stop=["zebra"], tools=[tool], user="canary user")
    answer = await tenant.client.post("/v1/chat/completions", json=body, headers={"x-graftwork-trace": "1"})

    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks(answer.text)]
    assert "xylophone" in "".join(texts)
    assert len(exporter.get_finished_spans()) > 10
    spans = " ".join(str((span.name, dict(span.attributes or {}))) for span in exporter.get_finished_spans())
    logged = " ".join(str(vars(record)) for record in caplog.records)
    for word in ("canary", "xylophone", "zebra", tenant.key):
        assert word not in spans
        assert word not in logged
    prompt = gateway.engine.requests[-1].prompt_token_ids
    assert str(list(prompt[:3]))[1:-1] not in spans + logged


async def test_a_request_that_is_not_kept_any_more_says_so(gateway: Gateway, tenant: TestTenant) -> None:
    """The owner of a served request hears that its timeline is elsewhere or gone; to others it is unknown as before."""
    request_id = (await tenant.client.post("/v1/chat/completions", json=chat())).headers["x-request-id"]
    other = await gateway.tenant("Globex")
    gateway.resources.server.traces.forget(tenant.id)

    own = await tenant.client.get(f"/v1/requests/{request_id}/timeline")
    foreign = await other.client.get(f"/v1/requests/{request_id}/timeline")

    assert (own.status_code, own.json()["error"]["code"]) == (404, "timeline_not_kept")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "timeline_not_found")


async def test_a_traced_request_of_another_gateway_is_found(gateway: Gateway, tenant: TestTenant) -> None:
    """A gateway that did not serve a traced request answers the same timeline, to its tenant and the operator alone."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"x-graftwork-trace": "1"})
    request_id, other = answer.headers["x-request-id"], await gateway.tenant("Globex")
    served = await timeline(tenant.client, request_id)
    await gateway.resources.server.trace_store.flush()
    gateway.resources.server.traces.forget(tenant.id)  # as if another gateway had served it

    assert await timeline(tenant.client, request_id) == served
    assert (await gateway.admin.get(f"/v1/admin/requests/{request_id}/timeline")).json() == served
    assert (await other.client.get(f"/v1/requests/{request_id}/timeline")).status_code == 404


async def test_nothing_of_a_deleted_tenant_is_kept(gateway: Gateway, tenant: TestTenant) -> None:
    """When a tenant is erased, its timelines go with it, also those that all gateways share."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"x-graftwork-trace": "1"})
    request_id = answer.headers["x-request-id"]
    await gateway.resources.server.trace_store.flush()
    await gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")
    await gateway.resources.admin.erasure.sweep()

    assert (await gateway.admin.get(f"/v1/admin/requests/{request_id}/timeline")).status_code == 404
