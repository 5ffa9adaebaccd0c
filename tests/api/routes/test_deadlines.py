"""Tests of deadlines for the first token: the header, the tiers' defaults, and the engine's refusals."""

from typing import Any

import pytest

from graftwork.engine.core.deadlines import line_of
from graftwork.platform.errors import CapacityContended, DeadlineExceeded, Unavailable
from tests.api.in_process_gateway import Gateway, TestTenant, chat

ASK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "tiny", "prompt": "Hello"},
    "/v1/messages": chat(max_tokens=50),
    "/v1/responses": {"model": "tiny", "input": "Hello"},
}


@pytest.mark.parametrize("path", ASK)
async def test_the_header_arrives_at_the_engine(path: str, gateway: Gateway, tenant: TestTenant) -> None:
    """`x-deadline-ms` is the deadline of the engine's request, less the time that the gateway has taken."""
    await tenant.client.post(path, json=ASK[path])
    await tenant.client.post(path, json=ASK[path], headers={"x-deadline-ms": "60000"})

    without, limited = (request.deadline_s for request in gateway.engine.requests)
    assert without is None
    assert limited is not None
    assert 0 < limited <= 60.0


async def test_a_turn_has_the_deadline_of_its_request(gateway: Gateway, tenant: TestTenant) -> None:
    """A session's turn takes the header like a chat."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()

    path = f"/v1/sessions/{session['id']}/turns"
    await tenant.client.post(path, json={"input": "Hello"}, headers={"x-deadline-ms": "60000"})

    (request,) = gateway.engine.requests
    assert request.deadline_s is not None
    assert 0 < request.deadline_s <= 60.0


async def test_only_the_first_answer_to_a_prompt_has_the_deadline(gateway: Gateway, tenant: TestTenant) -> None:
    """Further choices begin when the first one has its first token, so the deadline is not theirs."""
    await tenant.client.post("/v1/chat/completions", json=chat(n=3), headers={"x-deadline-ms": "60000"})

    assert sorted(request.deadline_s is None for request in gateway.engine.requests) == [False, True, True]


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "soon", "3600001", "١"])
async def test_a_wrong_deadline_is_refused(text: str, gateway: Gateway, tenant: TestTenant) -> None:
    """The deadline is a whole number of milliseconds from 1 to an hour; other values get a 400 that names the header."""
    headers = [(b"x-deadline-ms", text.encode())]

    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers=headers)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-deadline-ms")
    assert not gateway.engine.requests


async def test_a_refusal_by_deadline_says_when_to_retry(gateway: Gateway, tenant: TestTenant) -> None:
    """The engine's refusal is a 429 with the seconds rounded up, also for a stream, which has not begun yet."""
    gateway.engine.refusal = CapacityContended("Too late.", code="deadline_unreachable", retry_after_s=2.3)

    for stream in (False, True):
        answer = await tenant.client.post(
            "/v1/chat/completions", json=chat(stream=stream), headers={"x-deadline-ms": "100"}
        )

        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_unreachable")
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2300")


async def test_a_deadline_that_no_engine_meets_is_a_503(gateway: Gateway, tenant: TestTenant) -> None:
    """If waiting does not help, the answer is a 503 without a time to retry."""
    gateway.engine.refusal = Unavailable("Never.", code="deadline_unreachable")

    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"x-deadline-ms": "100"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_unreachable")
    assert "retry-after" not in answer.headers


async def test_a_deadline_that_passes_in_the_queue_is_a_504(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn that waited too long is refused with the engine's typed error."""
    gateway.engine.refusal = DeadlineExceeded("Waited too long.")
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()

    answer = await tenant.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Hello"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_document_has_the_header_where_tokens_are_generated(gateway: Gateway) -> None:
    """The OpenAPI document has the parameter `x-deadline-ms` for exactly the routes that promise a 504."""
    operations = {
        path: operation
        for path, by_method in gateway.app.openapi()["paths"].items()
        for operation in by_method.values()
    }

    for path, operation in operations.items():
        names = [parameter.get("$ref", "") for parameter in operation.get("parameters", ())]
        assert ("#/components/parameters/Deadline" in names) == ("504" in operation["responses"]), path


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/chat/completions", {"service_tier": "flex"}),
        ("/v1/completions", {"service_tier": "flex"}),
        ("/v1/messages", {}),
        ("/v1/embeddings", {"model": "tiny", "input": "Hello"}),
    ],
)
async def test_a_late_request_is_refused_before_its_prompt_is_read(
    gateway: Gateway, tenant: TestTenant, path: str, extra: dict[str, Any]
) -> None:
    """The line that is asked about is the one that the engine knows the request by. A refusal there is an HTTP status, and
    nothing is sent, reserved or billed."""
    ask = ASK.get(path, {}) | extra
    await tenant.client.post(path, json=ask, headers={"x-deadline-ms": "5000"})
    newcomer, sent = gateway.engine.newcomers[0], gateway.engine.requests[0]
    gateway.engine.lateness = CapacityContended("The queue is long.", retry_after_s=1.5)

    answer = await tenant.client.post(path, json=ask, headers={"x-deadline-ms": "5000"})

    assert (newcomer.line, 0 < (newcomer.deadline_s or 0.0) <= 5.0) == (line_of(sent), True)
    assert (answer.status_code, answer.headers["retry-after-ms"]) == (429, "1500")
    assert len(gateway.engine.requests) == 1
    assert len(await tenant.usage()) == 1


@pytest.mark.parametrize(
    "extra", [{}, {"background": True}, {"store": False}], ids=["plain", "background", "not stored"]
)
async def test_a_response_is_refused_before_its_prompt_is_read(
    gateway: Gateway, tenant: TestTenant, extra: dict[str, Any]
) -> None:
    """A response is asked about as a turn of a session, in its tier. A refusal is an HTTP status, also in the background;
    the engine gets nothing, and no row is stored: neither a session nor a usage row.
    """
    gateway.engine.lateness = CapacityContended("The queue is full.", retry_after_s=1.5)
    ask = ASK["/v1/responses"] | {"service_tier": "flex"} | extra

    answer = await tenant.client.post("/v1/responses", json=ask, headers={"x-deadline-ms": "5000"})

    (newcomer,) = gateway.engine.newcomers
    assert (newcomer.in_session, newcomer.tier, 0 < (newcomer.deadline_s or 0.0) <= 5.0) == (True, "flex", True)
    assert (answer.status_code, answer.headers["retry-after-ms"]) == (429, "1500")
    assert not gateway.engine.requests
    assert not await tenant.usage()
    counts = await gateway.resources.sessions.sessions.store.count_by_status()
    assert not any(counts.values())


async def test_a_turn_is_refused_before_its_prompt_is_read(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn that is refused leaves its session as it was: the next one begins with an empty history."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()
    path = f"/v1/sessions/{session['id']}/turns"
    gateway.engine.lateness = CapacityContended("The queue is full.", retry_after_s=1.5)

    refused = await tenant.client.post(path, json={"input": "First"}, headers={"x-deadline-ms": "5000"})
    gateway.engine.lateness = None
    answer = await tenant.client.post(path, json={"input": "Second"})

    assert (refused.status_code, refused.headers["retry-after-ms"]) == (429, "1500")
    assert answer.status_code == 200
    (request,) = gateway.engine.requests
    assert [newcomer.line for newcomer in gateway.engine.newcomers] == [line_of(request)] * 2
    assert request.session is not None
    assert request.session.history_tokens == 0


async def test_early_refusals_are_counted(gateway: Gateway, tenant: TestTenant) -> None:
    """A request that is refused before its prompt is read counts as refused in the metrics, like one that the engine refuses."""
    gateway.engine.lateness = CapacityContended("The queue is full.", retry_after_s=1.5)

    await tenant.client.post("/v1/chat/completions", json=chat())
    await tenant.client.post("/v1/responses", json=ASK["/v1/responses"])

    metrics = (await gateway.admin.get("/metrics")).text
    counted = [
        line for line in metrics.splitlines() if line.startswith("graftwork_requests_total") and "refused" in line
    ]
    assert [line.rpartition(" ")[2] for line in counted] == ["2.0"]
