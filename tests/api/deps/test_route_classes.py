"""Tests of authentication, limits on bodies, and the shape of errors."""

import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from graftwork.api.http.request import JSON_BODY_BYTES
from graftwork.platform.tenancy.principals import Principal
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, TestTenant, chat

JSON = {"content-type": "application/json"}


def check_shape(answer: httpx.Response) -> dict[str, Any]:
    """Every error has OpenAI's four fields and a request id."""
    assert answer.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    return error


async def test_request_id_is_on_every_answer(gateway: Gateway, tenant: TestTenant) -> None:
    """Each answer, good or bad, has a request id of the server's own, whatever the client sent."""
    headers = {"x-request-id": "mine"}
    ids = [
        (await client.get(path, headers=headers)).headers["x-graftwork-request-id"]
        for client in (gateway.anonymous, tenant.client)
        for path in ("/healthz", "/v1/models", "/v1/nothing", "/nothing", "/metrics")
    ]

    assert len(set(ids)) == len(ids)
    assert all(request_id.startswith("req_") for request_id in ids)


async def test_missing_and_wrong_keys(gateway: Gateway) -> None:
    """Without a key, or with a malformed or unknown one, every route under /v1 is a 401."""
    wrong: list[Any] = [
        {},
        {"authorization": "Basic abc"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer gw_unknown_secret"},
        {"authorization": "Bearer " + "x" * 3000},
        {"authorization": b"Bearer gw_\xff\xfe_\xc3"},
        {"x-api-key": "sk-other"},
    ]
    for path in ("/v1/models", "/v1/sessions", "/v1/admin/tenants"):
        for headers in wrong:
            answer = await gateway.anonymous.get(path, headers=headers)

            error = check_shape(answer)
            assert (answer.status_code, error["type"]) == (401, "authentication_error"), (path, headers)
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_api_key_header(gateway: Gateway, tenant: TestTenant) -> None:
    """A key may come as x-api-key."""
    answer = await gateway.anonymous.get("/v1/models", headers={"x-api-key": tenant.key})

    assert answer.status_code == 200


async def test_wrong_kind_of_key(gateway: Gateway, tenant: TestTenant) -> None:
    """The admin key cannot run inference, and a tenant's key cannot use admin routes."""
    infer = await gateway.admin.post("/v1/chat/completions", json=chat())
    administer = await tenant.client.get("/v1/admin/tenants")

    for answer in (infer, administer):
        assert (answer.status_code, check_shape(answer)["code"]) == (403, "wrong_key_kind")


async def test_every_route_needs_a_key(gateway: Gateway) -> None:
    """Without a key every route under /v1 is a 401 before its body is looked at."""
    for path, operations in gateway.app.openapi()["paths"].items():
        if not path.startswith("/v1"):
            continue
        for method in operations:
            answer = await gateway.anonymous.request(method, path, content=b"{nonsense", headers=JSON)

            assert answer.status_code == 401, (method, path)


async def test_suspended_tenant(gateway: Gateway, tenant: TestTenant) -> None:
    """A suspended tenant's keys are a 403."""
    await gateway.admin.post(f"/v1/admin/tenants/{tenant.id}/suspend")

    answer = await tenant.client.get("/v1/models")

    assert (answer.status_code, check_shape(answer)["code"]) == (403, "tenant_suspended")


async def test_unknown_routes(gateway: Gateway, tenant: TestTenant) -> None:
    """An unknown route is a 404 in our shape, and a wrong method a 405."""
    for path in ("/v1", "/v1/images/generations", "/v1/models/", "/v2/models", "/v1/adapters/a/b/c/d", "/doc"):
        answer = await tenant.client.get(path)

        assert (answer.status_code, check_shape(answer)["type"]) == (404, "not_found_error"), path
    wrong_method = await tenant.client.put("/v1/chat/completions", json=chat())
    assert (wrong_method.status_code, check_shape(wrong_method)["code"]) == (405, "method_not_allowed")
    assert check_shape(wrong_method)["message"].endswith(f"send {wrong_method.headers['allow'].replace(', ', ' or ')}.")


BROKEN: list[bytes] = [
    b"",
    b"{",
    b"\xff\xfe",
    b'{"model": NaN}',
    b'{"model": "tiny", "temperature": Infinity}',
    b"[" * 100_000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b'{"model": "tiny", "x": ' + b"[" * 65 + b"]" * 65 + b"}",
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'"text"',
    b"null",
]


async def test_broken_bodies(tenant: TestTenant) -> None:
    """A body that is not a valid JSON object is a 400 on OpenAI's routes and a 422 on ours."""
    for body in BROKEN:
        for path, status in (("/v1/chat/completions", 400), ("/v1/sessions", 422)):
            answer = await tenant.client.post(path, content=body, headers=JSON)

            assert answer.status_code == status, (path, body[:40], answer.text)
            check_shape(answer)


async def test_body_without_content_type(tenant: TestTenant) -> None:
    """A form body is refused with a hint where JSON is expected."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await tenant.client.post("/v1/chat/completions", content=json.dumps(chat()), headers=headers)

    assert answer.status_code == 400
    assert "application/json" in check_shape(answer)["message"]


async def test_large_bodies(tenant: TestTenant) -> None:
    """A body over the limit is a 413, with a declared length or in chunks."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(JSON_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    declared = await tenant.client.post("/v1/chat/completions", content=b" " * (JSON_BODY_BYTES + 1), headers=JSON)
    chunked = await tenant.client.post("/v1/sessions", content=pieces(), headers=JSON)

    for answer in (declared, chunked):
        assert (answer.status_code, check_shape(answer)["code"]) == (413, "payload_too_large")


async def test_compressed_bodies(tenant: TestTenant) -> None:
    """A compressed body is refused, because its real size is unknown."""
    answer = await tenant.client.post("/v1/sessions", content=b"x", headers={**JSON, "content-encoding": "gzip"})

    assert (answer.status_code, check_shape(answer)["param"]) == (422, "content-encoding")


async def test_null_characters(tenant: TestTenant) -> None:
    """A NUL character is a 404 in a path and refused in a query."""
    in_path = await tenant.client.get("/v1/adapters/a%00b")
    in_query = await tenant.client.get("/v1/adapters?after=a%00b")

    assert (in_path.status_code, in_query.status_code) == (404, 422)


async def test_list_parameters(tenant: TestTenant) -> None:
    """Lists take a limit of 1 to 100, an order, and a cursor that is an id of their own."""
    statuses = {
        query: (await tenant.client.get(f"/v1/adapters?{query}")).status_code
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=adp_0", "limit=100&order=asc")
    }

    assert list(statuses.values()) == [422, 422, 422, 422, 404, 200]


async def test_unexpected_failure(
    gateway: Gateway, tenant: TestTenant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug is a 500 that tells only the request id, which the log has too."""

    async def fail(principal: Principal, page: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(gateway.resources.sessions.sessions, "list_sessions", fail)

    answer = await tenant.client.get("/v1/sessions")

    error = check_shape(answer)
    assert (answer.status_code, error["code"]) == (500, "internal_error")
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"] in error["message"]
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert vars(record)["request_id"] == answer.headers["x-request-id"]


async def test_failure_while_generating(gateway: Gateway, tenant: TestTenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug during an answer is a 500, or the last event of a stream."""
    gateway.engine.breaks_after = 1
    monkeypatch.setattr(gateway.engine, "breakage", ZeroDivisionError("secret detail"))

    plain = await tenant.client.post("/v1/chat/completions", json=chat())
    streamed = await tenant.client.post("/v1/chat/completions", json=chat(stream=True))

    assert (plain.status_code, check_shape(plain)["code"]) == (500, "internal_error")
    assert '"internal_error"' in streamed.text.split("event: error")[1]
    assert "secret detail" not in plain.text + streamed.text


async def test_logs_hold_no_prompt_and_no_key(tenant: TestTenant, caplog: pytest.LogCaptureFixture) -> None:
    """Logs contain neither prompts nor keys."""
    caplog.set_level(logging.DEBUG, logger="graftwork")
    await tenant.client.post("/v1/chat/completions", json=chat("my canary phrase"))

    logged = " ".join(str(vars(record)) for record in caplog.records)
    assert "POST" in logged
    assert "canary" not in logged
    assert tenant.key not in logged
    assert ADMIN_KEY not in logged
