"""Tests of the SDK's errors: each error of the server has its own class."""

from typing import Any

import httpx
import pytest

from graftwork.api.sdk.client import Graftwork
from graftwork.api.sdk.transport import errors
from graftwork.platform.errors import error_classes
from tests.api.sdk.scripted_server import ScriptedServer, error

CLASS_BY_STATUS = {
    400: errors.BadRequestError,
    401: errors.AuthenticationError,
    403: errors.PermissionDeniedError,
    404: errors.NotFoundError,
    408: errors.RequestTimeoutError,
    409: errors.ConflictError,
    413: errors.PayloadTooLargeError,
    422: errors.ValidationError,
    429: errors.RateLimitError,
    500: errors.ServerError,
    503: errors.ServerError,
    504: errors.ServerError,
}


@pytest.mark.parametrize(("status", "expected"), CLASS_BY_STATUS.items())
def test_status_decides_the_class(status: int, expected: type[errors.APIError]) -> None:
    """Each status of the contract raises its own class, with all that the server said."""
    server = ScriptedServer(error(status, message="Too big.", code="too_big", param="weights", wanted=3))

    with pytest.raises(expected) as caught:
        server.client(max_retries=0).models.list()

    found = caught.value
    assert type(found) is expected
    assert (found.status_code, found.code, found.param) == (status, "too_big", "weights")
    assert (found.request_id, found.message, found.details) == ("req_1", "Too big.", {"wanted": 3})


def test_every_error_of_the_server_has_a_class() -> None:
    """Each error class of the server has a class in the SDK."""
    statuses = {error_class.status for error_class in error_classes().values()}

    found = {status: type(errors.error_from_description({}, status)) for status in statuses}

    assert errors.APIError not in found.values()


def test_every_error_type_of_the_server_is_known_in_streams() -> None:
    """An `error` event has only its type; each type of the platform's tree leads to its status' class."""
    for error_class in error_classes().values():
        found = errors.error_from_description({"message": "m", "type": error_class.type}, None)

        # Several 4xx statuses share invalid_request_error, and 400 stands for them.
        expected = 400 if error_class.type == "invalid_request_error" else error_class.status
        same_class = errors.error_from_description({}, expected)
        if error_class.type != "overloaded_error":
            assert type(found) is type(same_class)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(502, text="<html>bad gateway</html>"), "<html>bad gateway</html>"),
        (httpx.Response(502), "Bad Gateway"),
        (httpx.Response(404, json={"detail": "Not Found"}), "Not Found"),
        (httpx.Response(500, json=["?"]), '["?"]'),
    ],
)
def test_foreign_bodies_become_the_message(response: httpx.Response, message: str) -> None:
    """A proxy's answer, which is not ours in form, is still a typed error."""
    assert errors.error_from_response(response).message == message


@pytest.mark.parametrize(
    ("failure", "expected", "code"),
    [
        (httpx.ConnectError("refused"), errors.APIConnectionError, "unreachable"),
        (httpx.ReadTimeout("slow"), errors.APITimeoutError, "timeout"),
        (httpx.RemoteProtocolError("gone"), errors.APIConnectionError, "dropped"),
    ],
)
def test_transport_failures_are_typed(failure: Any, expected: type[errors.APIError], code: str) -> None:
    """Errors of httpx are converted."""
    with pytest.raises(expected) as caught:
        ScriptedServer(failure).client(max_retries=0).models.list()

    assert (caught.value.code, caught.value.status_code) == (code, None)


def test_missing_key_is_found_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without its key names the argument and the variable, and sends nothing."""
    monkeypatch.delenv("GRAFTWORK_ADMIN_KEY", raising=False)
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    with (
        Graftwork("http://graftwork.test", "gw_key", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(errors.ConfigurationError, match="GRAFTWORK_ADMIN_KEY"),
    ):
        client.admin.tenants.list()

    assert sent == []
