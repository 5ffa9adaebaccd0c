"""Every error below `/v1/messages` has Anthropic's form; so has every error of `/v1/models` for Anthropic's clients."""

from collections.abc import Sequence

import httpx
import pytest

from graftwork.api.http.request import JSON_BODY_BYTES
from graftwork.platform.errors import CapacityContended, DeadlineExceeded, GraftworkError, InternalFailure, Unavailable
from graftwork.platform.quotas.quota import Quota
from tests.api.in_process_gateway import Gateway, TestTenant

BODY = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
VERSION = {"anthropic-version": "2023-06-01"}
JSON = {"content-type": "application/json"}


def check_form(answer: httpx.Response, status: int, kind: str) -> str:
    """Checks that an answer is an error in Anthropic's form. Returns the error's message."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/drafts", 404, "not_found_error"),
        ("GET", "/v1/messages/drafts/msgdraft_1/results", 404, "not_found_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
    ],
)
async def test_paths_that_are_no_routes(tenant: TestTenant, method: str, path: str, status: int, kind: str) -> None:
    """A wrong method and an unknown path have Anthropic's form, and a 405 names the right methods."""
    answer = await tenant.client.request(method, path)

    check_form(answer, status, kind)
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_refusals_before_the_route_runs(gateway: Gateway, tenant: TestTenant, path: str) -> None:
    """A missing key, a wrong key, a body that is too large, and broken JSON have Anthropic's form."""
    big = b'"' + b"x" * JSON_BODY_BYTES + b'"'

    check_form(await gateway.anonymous.post(path, json=BODY), 401, "authentication_error")
    check_form(await gateway.client("gw_wrong").post(path, json=BODY), 401, "authentication_error")
    check_form(await tenant.client.post(path, content=big, headers=JSON), 413, "request_too_large")
    check_form(await tenant.client.post(path, content=b"{", headers=JSON), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (CapacityContended("The queue is full.", retry_after_s=1.0), 429, "rate_limit_error"),
        (Unavailable("No engine answers.", retry_after_s=1.0), 503, "overloaded_error"),
        (DeadlineExceeded("The time is over."), 504, "timeout_error"),
        (InternalFailure("Our bug."), 500, "api_error"),
    ],
)
async def test_refusals_of_the_engine(
    gateway: Gateway, tenant: TestTenant, refusal: GraftworkError, status: int, kind: str
) -> None:
    """Each refusal of the engine keeps its status and its `retry-after`, streamed or not."""
    gateway.engine.refusal = refusal

    for stream in (False, True):
        answer = await tenant.client.post("/v1/messages", json=BODY | {"stream": stream})

        check_form(answer, status, kind)
        assert ("retry-after" in answer.headers) == (refusal.retry_after_s is not None)


async def test_a_limit_has_the_form(gateway: Gateway) -> None:
    """A tenant's own limit is a `rate_limit_error`."""
    tenant = await gateway.tenant("Limited", Quota(requests_per_minute=1))
    await tenant.client.post("/v1/messages", json=BODY)

    check_form(await tenant.client.post("/v1/messages", json=BODY), 429, "rate_limit_error")


async def test_a_crash_has_the_form(gateway: Gateway, tenant: TestTenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that nobody expected is an `api_error` that tells only the request's id."""

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(gateway.resources.inference.registry, "resolve", fail)

    answer = await tenant.client.post("/v1/messages", json=BODY)

    assert answer.headers["x-request-id"] in check_form(answer, 500, "api_error")
    assert "secret detail" not in answer.text


async def test_errors_of_models(gateway: Gateway, tenant: TestTenant) -> None:
    """Errors of `/v1/models` have Anthropic's form only for a request with Anthropic's header."""
    ours = await tenant.client.get("/v1/models/nobody")
    stranger = await gateway.anonymous.get("/v1/models", headers=VERSION)

    check_form(await tenant.client.get("/v1/models/nobody", headers=VERSION), 404, "not_found_error")
    check_form(stranger, 401, "authentication_error")
    assert set(ours.json()) == {"error"}


async def test_other_routes_keep_openais_form(tenant: TestTenant) -> None:
    """A path that only begins like Anthropic's has OpenAI's form."""
    answers: Sequence[httpx.Response] = [
        await tenant.client.get("/v1/messagesx", headers=VERSION),
        await tenant.client.get("/v1/chat/completions", headers=VERSION),
    ]

    assert [set(answer.json()) for answer in answers] == [{"error"}, {"error"}]
