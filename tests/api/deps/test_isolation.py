"""Tests that another tenant's id answers like an unknown id on every route."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from graftwork.platform.ledger.price_keeper import NewPrices
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload
from tests.api.signed_in import SENDERS, send_as

UNKNOWN = {
    "session_id": "ses_00000000000000000000000000",
    "name": "nobodys",
    "alias": "nobodys",
    "version": "1",
    "model": "nobodys",
    "checkpoint": "ckp_00000000000000000000000000",
    "call_id": "call_0",
    "response_id": "resp_00000000000000000000000000",
    "conversation_id": "conv_00000000000000000000000000",
    "item_id": "item_00000000000000000000000000",
    "request_id": "req_00000000000000000000000000",
    "rollout_id": "rol_00000000000000000000000000",
    "file_id": "file_00000000000000000000000000",
    "export_id": "export_00000000000000000000000000",
    "batch_id": "batch_00000000000000000000000000",
    "message_batch_id": "msgbatch_00000000000000000000000000",
    "upload_id": "upl_00000000000000000000000000",
    "key_id": "key_00000000000000000000000000",
}
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/adapters/{name}/versions": {"files": adapter_upload(5)},
    "PATCH /v1/adapter_uploads/{upload_id}": {
        "content": b"x",
        "headers": {"upload-offset": "0", "content-type": "application/octet-stream"},
    },
    "PUT /v1/adapters/{name}/aliases/{alias}": {"json": {"version": 1}},
    "PATCH /v1/adapters/{name}": {"json": {"tags": ["x"]}},
    "POST /v1/adapters/{name}/rollouts": {"json": {"version": 1, "steps": [{"weight": 10, "seconds": 60}]}},
    "PATCH /v1/sessions/{session_id}": {"json": {"metadata": {}}},
    "POST /v1/sessions/{session_id}/turns": {"json": {"input": "x"}},
    "POST /v1/sessions/{session_id}/tool_outputs": {"json": {"outputs": [{"call_id": "call_0", "output": "x"}]}},
    "POST /v1/sessions/{session_id}/fork": {"json": {}},
    "POST /v1/sessions/{session_id}/rewind": {"json": {"to": UNKNOWN["checkpoint"]}},
    "POST /v1/keys/{key_id}/rotate": {"json": {"overlap_s": 60}},
    "POST /v1/conversations/{conversation_id}": {"json": {"metadata": {}}},
    "POST /v1/conversations/{conversation_id}/items": {"json": {"items": [{"role": "user", "content": "x"}]}},
}


KEYS = "/v1/admin/tenants/{tenant_id}/keys/{key_id}"
OPERATORS_BODIES: dict[str, dict[str, Any]] = {
    f"POST {KEYS}/rotate": {"json": {}},
    f"PUT {KEYS}/quota": {"json": {"requests_per_minute": 1}},
}
"""A valid body of each operator's route for something of one tenant."""
PEOPLES = "/v1/keys"
"""Routes for signed-in people alone: a key gets the same 403 for every id."""
ORDER = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""The order in which an owner can use all routes: what is deleted goes last, the innermost first."""


def routes_with_ids(gateway: Gateway) -> Iterator[tuple[str, str, list[str]]]:
    """(method, path, names of its parameters) of every tenant's route that has any."""
    yield from _routes(gateway, lambda path, names: bool(names) and not path.startswith("/v1/admin"), BODIES)


def nested_routes(gateway: Gateway) -> Iterator[tuple[str, str, list[str]]]:
    """The same of every operator's route for something of one tenant, by the tenant's id and an id of its own."""
    yield from _routes(
        gateway, lambda path, names: path.startswith("/v1/admin/tenants/") and len(names) > 1, OPERATORS_BODIES
    )


def _routes(
    gateway: Gateway, is_wanted: Callable[[str, list[str]], bool], bodies: Mapping[str, Any]
) -> Iterator[tuple[str, str, list[str]]]:
    for path, operations in gateway.app.openapi()["paths"].items():
        names = re.findall(r"{(\w+)}", path)
        for method, operation in operations.items() if is_wanted(path, names) else ():
            route = f"{method.upper()} {path}"
            assert "requestBody" not in operation or route in bodies, f"give {route} a valid body"
            yield method.upper(), path, names


async def owned_ids(gateway: Gateway, tenant: TestTenant) -> dict[str, str]:
    """Creates one object of each kind. Returns their ids by the names that routes give them."""
    await tenant.push_adapter("pirate")
    await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})
    await tenant.push_adapter("pirate", 1)
    steps = {"version": 2, "steps": [{"weight": 10, "seconds": 60}]}
    rollout = (await tenant.client.post("/v1/adapters/pirate/rollouts", json=steps)).json()
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    turn = (await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"})).json()
    answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "x"})
    first = {"items": [{"role": "user", "content": "x"}]}
    conversation = (await tenant.client.post("/v1/conversations", json=first)).json()
    new = {"name": "pirate", "config": "{}", "size_bytes": 2, "digest": "sha256:" + "0" * 64}
    upload = (await tenant.client.post("/v1/adapter_uploads", json=new)).json()
    batches = await owned_batches(tenant)
    items = (await tenant.client.get(f"/v1/conversations/{conversation['id']}/items")).json()
    key, _ = await gateway.resources.account.tenancy.create_key(tenant.id, "second")
    export = (await tenant.client.post("/v1/exports")).json()
    while export["status"] != "completed":
        export = (await tenant.client.get(f"/v1/exports/{export['id']}")).json()
    return {
        **batches,
        "export_id": export["id"],
        "item_id": items["first_id"],
        "key_id": key.id,
        "response_id": answer.json()["id"],
        "request_id": answer.headers["x-request-id"],
        "conversation_id": conversation["id"],
        "session_id": session,
        "name": "pirate",
        "rollout_id": rollout["id"],
        "upload_id": upload["id"],
        "alias": "prod",
        "version": "1",
        "model": "pirate",
        "checkpoint": turn["checkpoint_id"],
    }


async def deleted(tenant: TestTenant, path: str) -> dict[str, str]:
    """Makes an adapter with two versions, and deletes what the route `path` restores. Returns the ids in the path."""
    for seed in (2, 3):
        await tenant.push_adapter("retired", seed)
    ids = {"name": "retired", "version": "2"}
    await tenant.client.delete(path.removesuffix("/restore").format(**ids))
    return ids


def owners_body(body: dict[str, Any], owned: dict[str, str]) -> dict[str, Any]:
    """The same body with the owner's id in place of the unknown one."""
    return body | {"json": {"to": owned["checkpoint"]}} if body.get("json", {}).get("to") else body


async def owned_batches(tenant: TestTenant) -> dict[str, str]:
    """Creates a file, a batch of it, and a batch of messages that has ended. Returns their ids by the names in routes."""
    upload = {"file": ("requests.jsonl", b"{}")}
    file = (await tenant.client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await tenant.client.post("/v1/batches", json=body)).json()
    params = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    requests = {"requests": [{"custom_id": "x", "params": params}]}
    messages = (await tenant.client.post("/v1/messages/batches", json=requests)).json()
    while messages["processing_status"] != "ended":
        messages = (await tenant.client.get(f"/v1/messages/batches/{messages['id']}")).json()
    return {"file_id": file["id"], "batch_id": batch["id"], "message_batch_id": messages["id"]}


@pytest.mark.parametrize("sender", SENDERS)
async def test_ids_of_others(gateway: Gateway, tenant: TestTenant, sender: str) -> None:
    """For every route of the OpenAPI document, B gets the same 404 for A's id as for one that nobody has.

    This holds with a key, with the cookie of the web console for it, and for a person who has signed in.
    """
    owned = await owned_ids(gateway, tenant)
    other = await gateway.tenant("Other")
    await send_as(gateway, other, sender)
    checked = 0
    for method, path, names in routes_with_ids(gateway):
        body = BODIES.get(f"{method} {path}", {})
        foreign = await other.client.request(method, path.format(**owned), **body)
        unknown = await other.client.request(method, path.format(**UNKNOWN), **body)

        expected = 403 if path.startswith(PEOPLES) and sender != "person" else 404
        assert foreign.status_code == unknown.status_code == expected, (method, path, foreign.text)
        assert seen(foreign, [owned[name] for name in names]) == seen(unknown, [UNKNOWN[name] for name in names]), (
            method,
            path,
        )
        checked += 1
    assert checked >= 55


async def test_ids_of_another_tenant_in_operators_routes(gateway: Gateway, tenant: TestTenant) -> None:
    """What belongs to A cannot be read, changed or deleted by way of B, not even by the operator: it is a 404 there."""
    other = await gateway.tenant("Other")
    key = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"][0]
    export = (await gateway.admin.post(f"/v1/admin/tenants/{tenant.id}/exports")).json()
    owned = {"tenant_id": other.id, "key_id": key["id"], "export_id": export["id"]}
    unknown = {"tenant_id": other.id, "key_id": "key_00000000000000000000000000", "export_id": UNKNOWN["export_id"]}
    checked = 0
    for method, path, names in nested_routes(gateway):
        body = OPERATORS_BODIES.get(f"{method} {path}", {})
        answers = [await gateway.admin.request(method, path.format(**ids), **body) for ids in (owned, unknown)]

        assert [answer.status_code for answer in answers] == [404, 404], (method, path, answers[0].text)
        shown = [
            seen(answer, [ids[name] for name in names]) for answer, ids in zip(answers, (owned, unknown), strict=True)
        ]
        assert shown[0] == shown[1], (method, path)
        checked += 1
    assert checked >= 7
    assert (await tenant.client.get("/v1/models")).status_code == 200
    kept = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"]
    assert kept == [key | {"last_used_at": kept[0]["last_used_at"]}]


@pytest.mark.parametrize("sender", SENDERS)
async def test_owner_is_let_in(gateway: Gateway, tenant: TestTenant, sender: str) -> None:
    """The owner's same requests succeed, or fit the object's state alone, so those of `test_ids_of_others` are valid."""
    owned = await owned_ids(gateway, tenant)
    await send_as(gateway, tenant, sender)
    routes = [*routes_with_ids(gateway)]
    routes.sort(key=lambda route: (ORDER.index(route[0]), -len(route[1])))
    for method, path, _ in routes:
        fields = owned if not path.endswith("/restore") else owned | await deleted(tenant, path)
        body = owners_body(BODIES.get(f"{method} {path}", {}), owned)
        answer = await tenant.client.request(method, path.format(**fields), **body)

        expected = {200} if method == "GET" else {200, 201, 409}
        expected = {403} if path.startswith(PEOPLES) and sender != "person" else expected
        assert answer.status_code in expected, (method, path, answer.text)


async def test_checkpoints_of_others(gateway: Gateway, tenant: TestTenant) -> None:
    """Another tenant's checkpoint, or another session's, answers like one that does not exist."""
    owned = await owned_ids(gateway, tenant)
    other = await gateway.tenant("Other")
    for holder in (tenant, other):
        session = (await holder.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
        for action, field in (("fork", "at"), ("rewind", "to")):
            path = f"/v1/sessions/{session}/{action}"
            foreign = await holder.client.post(path, json={field: owned["checkpoint"]})
            unknown = await holder.client.post(path, json={field: UNKNOWN["checkpoint"]})

            assert foreign.status_code == unknown.status_code == 404
            assert without_echo(foreign.text, [owned["checkpoint"]]) == without_echo(
                unknown.text, [UNKNOWN["checkpoint"]]
            )


@pytest.mark.parametrize("sender", SENDERS)
async def test_models_of_others(gateway: Gateway, tenant: TestTenant, sender: str) -> None:
    """Another tenant's adapter cannot be used under any of its names, and lists do not show it."""
    await owned_ids(gateway, tenant)
    other = await gateway.tenant("Other")
    await send_as(gateway, other, sender)
    for model in ("pirate", "pirate@1", "pirate@prod"):
        answer = await other.client.post("/v1/completions", json={"model": model, "prompt": "x"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert [model["id"] for model in (await other.client.get("/v1/models")).json()["data"]] == ["tiny"]
    for path in ("/v1/adapters", "/v1/sessions", "/v1/usage"):
        assert (await other.client.get(path)).json()["data"] == []


@pytest.mark.parametrize("sender", SENDERS)
async def test_prices_and_costs_of_others(gateway: Gateway, tenant: TestTenant, sender: str) -> None:
    """B sees neither A's prices nor A's costs, even if it names A, and the operator's routes refuse it."""
    rates = {"input": "0.5", "output": "1.5"}
    await gateway.resources.admin.prices.set(NewPrices(rates, "USD", tenant.id))
    await tenant.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    other = await gateway.tenant("Other")
    for holder in (other, tenant):
        await send_as(gateway, holder, sender)
    month = datetime.fromtimestamp(gateway.clock.now(), UTC).strftime("%Y-%m")
    query = {"tenant_id": tenant.id, "month": month}
    own = (await tenant.client.get("/v1/usage/invoice", params=query)).json()
    foreign = (await other.client.get("/v1/usage/invoice", params=query)).json()

    assert len(own["lines"]) == 2
    assert (foreign["tenant_id"], foreign["lines"], foreign["requests"]) == (other.id, [], 0)
    assert len((await tenant.client.get("/v1/prices")).json()["data"]) == 1
    for path in ("/v1/prices", "/v1/usage"):
        assert (await other.client.get(path, params={"tenant_id": tenant.id})).json()["data"] == []
    for path in ("/v1/admin/prices", "/v1/admin/usage", "/v1/admin/usage/invoice"):
        assert (await other.client.get(path, params=query)).status_code in (401, 403), path
    refused = await other.client.post("/v1/admin/prices", json={"currency": "USD", "rates": rates})
    assert refused.status_code in (401, 403)
    assert len((await gateway.admin.get("/v1/admin/prices")).json()["data"]) == 1


async def test_cursors_of_others(gateway: Gateway, tenant: TestTenant) -> None:
    """Another tenant's id is refused as a cursor."""
    adapter = await tenant.push_adapter("pirate")
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()
    other = await gateway.tenant("Other")
    for path, cursor in (("/v1/adapters", adapter["id"]), ("/v1/sessions", session["id"])):
        answer = await other.client.get(f"{path}?after={cursor}")

        assert answer.status_code == 404 or answer.json()["data"] == []


async def test_engine_domains(gateway: Gateway, tenant: TestTenant) -> None:
    """Each tenant has one isolation domain of its own, which does not name the tenant."""
    other = await gateway.tenant("Other")
    for client in (tenant.client, tenant.client, other.client):
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})

    first, second, third = gateway.engine.requests
    assert first.domain == second.domain != third.domain
    assert tenant.id not in str(first)


def seen(answer: httpx.Response, ids: list[str]) -> tuple[int, list[tuple[str, str]], str]:
    """Returns all that tells two refusals apart, byte for byte: status, headers in their order, and body.

    Left out are the ids that were asked for, those of the request itself, and the length, which comes from both.
    """
    own = {"x-request-id", "request-id", "x-graftwork-request-id", "x-graftwork-trace-id", "content-length"}
    headers = [(name, value) for name, value in answer.headers.multi_items() if name not in own]
    return answer.status_code, headers, without_echo(answer.text, [*ids, answer.headers["x-request-id"]])


def without_echo(text: str, ids: list[str]) -> str:
    """Returns a body without the ids that it may repeat."""
    for echoed in ids:
        text = text.replace(echoed, "<id>")
    return text
