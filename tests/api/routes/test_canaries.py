"""Tests of who gets which version of a canary: by the end user, the session, the response before, or the key."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat

PATH = "/v1/adapters/pirate/aliases/prod"


@pytest.fixture
async def canary(gateway: Gateway, tenant: TestTenant) -> TestTenant:
    """A tenant whose adapter has two versions, each with half of the traffic."""
    await tenant.push_adapter()
    await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))
    await tenant.client.put(PATH, json={"weights": {"1": 1, "2": 1}})
    return tenant


async def versions_of(tenant: TestTenant, path: str, bodies: list[dict[str, Any]]) -> list[str]:
    """The versions that answer these requests, by the header that names them."""
    answers = [await tenant.client.post(path, json=body) for body in bodies]
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return [answer.headers["x-graftwork-model"] for answer in answers]


def chat_for(user: str) -> dict[str, Any]:
    return chat(model="pirate", user=user)


def newer_chat_for(user: str) -> dict[str, Any]:
    return chat(model="pirate", safety_identifier=user)


def completion_for(user: str) -> dict[str, Any]:
    return {"model": "pirate", "prompt": "Hello", "user": user}


def message_for(user: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "pirate", "max_tokens": 4, "messages": messages, "metadata": {"user_id": user}}


def response_for(user: str) -> dict[str, Any]:
    return {"model": "pirate", "input": "Hello", "user": user}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", newer_chat_for),
        ("/v1/completions", completion_for),
        ("/v1/messages", message_for),
    ],
)
async def test_an_end_user_has_one_version_on_every_route(
    canary: TestTenant, path: str, body: Callable[[str], dict[str, Any]]
) -> None:
    """All requests of one end user have the same version, by whatever route and field, and not all users share one."""
    users = [f"user {number}" for number in range(12)]

    by_chat = await versions_of(canary, "/v1/chat/completions", [chat_for(user) for user in users])
    by_other = await versions_of(canary, path, [body(user) for user in users])

    assert by_other == by_chat
    assert set(by_chat) == {"pirate@1", "pirate@2"}


async def test_a_request_that_names_nobody_has_the_version_of_its_key(canary: TestTenant, gateway: Gateway) -> None:
    """Requests without an end user all have the version of their key, and other keys may have the other version."""
    tenancy = gateway.resources.account.tenancy
    keys = [(await tenancy.create_key(canary.id, f"key {number}"))[1] for number in range(12)]

    first, again = [
        [
            (await gateway.client(key).post("/v1/chat/completions", json=chat(model="pirate"))).headers[
                "x-graftwork-model"
            ]
            for key in keys
        ]
        for _ in range(2)
    ]

    assert again == first
    assert set(first) == {"pirate@1", "pirate@2"}


async def test_a_session_keeps_its_version(canary: TestTenant) -> None:
    """Sessions divide over both versions, and none moves when the weights change or the alias leaves its version."""
    sessions = [(await canary.client.post("/v1/sessions", json={"model": "pirate"})).json() for _ in range(12)]
    pinned = [session["model"] for session in sessions]

    for target in ({"weights": {"1": 1, "2": 1000}}, {"version": 2}):
        await canary.client.put(PATH, json=target)
        for session in sessions:
            await canary.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Hello"})
        now = [(await canary.client.get(f"/v1/sessions/{session['id']}")).json()["model"] for session in sessions]
        assert now == pinned

    assert len({str(adapter) for adapter in pinned}) == 2


async def test_a_chain_of_responses_keeps_its_version(canary: TestTenant, gateway: Gateway) -> None:
    """A response goes on with the version of the one before it, also in a fork, as long as the alias leads there."""
    digests = [version["digest"] for version in (await canary.client.get("/v1/adapters/pirate")).json()["versions"]]
    firsts = [
        (await canary.client.post("/v1/responses", json=response_for(f"u{number}"))).json() for number in range(8)
    ]
    used = [request.adapter_digests[0] for request in gateway.engine.requests]
    assert set(used) == set(digests)

    await canary.client.put(PATH, json={"weights": {"1": 1, "2": 1000}})
    for _ in range(2):  # the second time is a fork
        gateway.engine.requests.clear()
        for first in firsts:
            body = {"model": "pirate", "input": "Go on", "previous_response_id": first["id"]}
            assert (await canary.client.post("/v1/responses", json=body)).status_code == 200
        assert [request.adapter_digests[0] for request in gateway.engine.requests] == used

    await canary.client.put(PATH, json={"version": 2})
    gateway.engine.requests.clear()
    body = {"model": "pirate", "input": "Go on", "previous_response_id": firsts[0]["id"]}
    await canary.client.post("/v1/responses", json=body)
    assert [request.adapter_digests[0] for request in gateway.engine.requests] == [digests[1]]


async def test_an_end_user_is_a_text(canary: TestTenant) -> None:
    """An end user that is no text is a 400 that names the field, and an empty one counts as none."""
    wrong = await canary.client.post("/v1/chat/completions", json=chat(model="pirate", user=7))
    empty = await canary.client.post("/v1/chat/completions", json=chat(model="pirate", user=""))

    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "user")
    assert empty.status_code == 200
