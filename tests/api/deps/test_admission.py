"""Tests of the refusal of a tenant that has no place left, before any other work for its request."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event

from tests.api.fake_engine import MAX_ANSWERS
from tests.api.in_process_gateway import Gateway, TestTenant, chat


@contextmanager
def statements() -> Iterator[list[str]]:
    """The SQL statements that any database of this process gets within the block."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def assert_full(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full"), answer.text
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_refusal_reads_neither_the_database_nor_the_body(gateway: Gateway, tenant: TestTenant) -> None:
    """A known tenant without a place left is refused before a statement is sent and before a byte of the body is read."""
    assert (await tenant.client.get("/v1/models")).status_code == 200

    async def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS), statements() as sent:
        answer = await tenant.client.post("/v1/chat/completions", content=body())

    assert_full(answer)
    assert sent == []


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/sessions/ses_none/turns"]
)
async def test_every_route_that_generates_refuses_before_it_looks(
    gateway: Gateway, tenant: TestTenant, path: str
) -> None:
    """While all places are taken, a body that is not JSON gets a 429; with one place free, it gets its own error."""
    headers = {"content-type": "application/json"}
    assert (await tenant.client.get("/v1/models")).status_code == 200

    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS):
        refused = await tenant.client.post(path, content=b"{", headers=headers)
    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS - 1):
        read = await tenant.client.post(path, content=b"{", headers=headers)

    assert refused.status_code == 429
    assert read.status_code in (400, 422), read.text


async def test_a_request_takes_no_more_places_than_it_has_answers(gateway: Gateway, tenant: TestTenant) -> None:
    """With three places left, a known tenant gets three answers, and four are refused; all places come back."""
    in_flight = gateway.resources.inference.accounting.in_flight
    for _ in range(2):
        with in_flight.take(tenant.id, MAX_ANSWERS - 3):
            served = await tenant.client.post("/v1/chat/completions", json=chat(n=3))
            refused = await tenant.client.post("/v1/chat/completions", json=chat(n=4))

        assert (served.status_code, len(served.json()["choices"])) == (200, 3)
        assert_full(refused)
    in_flight.take(tenant.id, MAX_ANSWERS)


async def test_other_tenants_and_other_routes_go_on(gateway: Gateway, tenant: TestTenant) -> None:
    """A known tenant without a place left still reads its models; another tenant still gets an answer."""
    other = await gateway.tenant("Umbrella")
    assert (await tenant.client.get("/v1/models")).status_code == 200
    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS):
        assert (await tenant.client.get("/v1/models")).status_code == 200
        assert (await other.client.post("/v1/chat/completions", json=chat())).status_code == 200
        assert_full(await tenant.client.post("/v1/chat/completions", json=chat()))


async def test_a_key_that_is_no_longer_right_gets_nothing(gateway: Gateway, tenant: TestTenant) -> None:
    """A revoked key may be refused for want of places, but is a 401 as soon as there are some, and from then on."""
    assert (await tenant.client.get("/v1/models")).status_code == 200
    tenancy = gateway.resources.account.tenancy
    key_id = (await tenancy.list_keys(tenant.id)).items[0].id
    await tenancy.revoke_key(tenant.id, key_id)

    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS):
        assert_full(await tenant.client.post("/v1/chat/completions", json=chat()))
    assert (await tenant.client.post("/v1/chat/completions", json=chat())).status_code == 401
    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS):
        assert (await tenant.client.post("/v1/chat/completions", json=chat())).status_code == 401


async def test_a_repeated_request_gets_its_stored_answer(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn that is sent again with its `Idempotency-Key` needs no place, and is not refused."""
    session = (await tenant.client.post("/v1/sessions", json={"model": chat()["model"]})).json()["id"]
    path, headers = f"/v1/sessions/{session}/turns", {"idempotency-key": "once"}
    first = await tenant.client.post(path, json={"input": "Hi"}, headers=headers)

    with gateway.resources.inference.accounting.in_flight.take(tenant.id, MAX_ANSWERS):
        again = await tenant.client.post(path, json={"input": "Hi"}, headers=headers)

    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json()["id"] == first.json()["id"]
