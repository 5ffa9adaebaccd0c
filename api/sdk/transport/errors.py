"""Defines every error that the SDK raises.

    GraftworkError
    ├── ConfigurationError          a key, a folder or an argument is missing; the SDK sent nothing
    ├── ToolLoopError               `session.run` reached its limit of turns; `turns` holds the turns
    ├── TurnFailedError             the turn failed or was cancelled; `turn` holds the turn
    └── APIError                    has status_code, code, param, request_id, message and details
        ├── APIConnectionError      no answer came, or the answer broke off; status_code is None
        │   └── APITimeoutError     the answer took longer than `timeout`
        ├── BadRequestError         400  the server cannot use a value; `param` names the field
        ├── AuthenticationError     401  the key is missing, wrong, expired or revoked
        ├── PermissionDeniedError   403  the key is valid, but does not allow this call
        ├── NotFoundError           404  the object does not exist, or another tenant owns it
        ├── RequestTimeoutError     408  the body of an upload arrived too slowly
        ├── ConflictError           409  the object's state does not allow this; `details` has the state
        ├── PayloadTooLargeError    413  the body is too large
        ├── ValidationError         422  a field or an adapter's file is wrong; `param` names it
        ├── RateLimitError          429  the tenant reached a limit, or the engine is full
        └── ServerError             5xx  the server failed, or no engine can serve the request

`graftwork.platform.errors` defines the same statuses. The SDK does not import that module, because the SDK runs
without the server.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line imports this module at every start, but needs httpx only for calls to a server
    import httpx


class GraftworkError(Exception):
    """The base class of all errors of the SDK. `message` says what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigurationError(GraftworkError):
    """The caller gave no key, or a folder or an argument is missing. The SDK sent nothing."""


class ToolLoopError(GraftworkError):
    """The model still called tools in the last allowed turn. The session now waits for the tools' outputs."""

    def __init__(self, message: str, turns: Sequence[Any]) -> None:
        super().__init__(message)
        self.turns = tuple(turns)


class TurnFailedError(GraftworkError):
    """A turn of `session.run` ended without an answer."""

    def __init__(self, message: str, turn: Any) -> None:
        super().__init__(message)
        self.turn = turn


class APIError(GraftworkError):
    """The server answered with an error, or sent no complete answer."""

    def __init__(
        self,
        message: str,
        *,
        status_code: int | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.code = code
        self.param = param
        self.request_id = request_id
        self.details = dict(details or {})

    def __str__(self) -> str:
        status = f"{self.status_code}: " if self.status_code else ""
        where = f" ({self.param})" if self.param else ""
        return f"{status}{self.message}{where}"


class APIConnectionError(APIError):
    """The SDK could not reach the server, or the connection broke."""


class APITimeoutError(APIConnectionError):
    """The server took longer than the client's timeout."""


class BadRequestError(APIError):
    """400: the server cannot use a value in the request. `param` names the field."""


class AuthenticationError(APIError):
    """401: the API key is missing, wrong, expired or revoked."""


class PermissionDeniedError(APIError):
    """403: the API key does not allow this call."""


class NotFoundError(APIError):
    """404: the object does not exist, or another tenant owns it."""


class RequestTimeoutError(APIError):
    """408: the body of the request arrived too slowly."""


class ConflictError(APIError):
    """409: the state of the object does not allow this call now. `details` has the state."""


class PayloadTooLargeError(APIError):
    """413: the body of the request is too large."""


class ValidationError(APIError):
    """422: a field of the request or a file of an adapter is wrong. `param` names the field or file."""


class RateLimitError(APIError):
    """429: the tenant reached a limit, or the engine is full."""


class ServerError(APIError):
    """500 and above: the server failed, or no engine can serve the request."""


ERROR_BY_STATUS: Mapping[int, type[APIError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: RequestTimeoutError,
    409: ConflictError,
    413: PayloadTooLargeError,
    422: ValidationError,
    429: RateLimitError,
}

STATUS_BY_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "overloaded_error": 503,
    "timeout_error": 504,
    "internal_error": 500,
}
"""Maps the type of an `error` event in a stream to a status. Such an event has no status."""


def error_from_response(response: "httpx.Response") -> APIError:
    """Converts an HTTP answer with an error status to an error of the SDK.

    The caller must have read the answer's body.
    """
    body = _json_or_none(response)
    described = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    fallback = response.text.strip()[:500] or response.reason_phrase
    return error_from_description(described or fallback, response.status_code, response.headers.get("x-request-id"))


def error_from_description(described: object, status: int | None, request_id: str | None = None) -> APIError:
    """Converts the JSON object of an error, `{"message": …, "type": …, "param": …, "code": …}`, to an error of the SDK.

    `details` of the error gets the other fields of the object. If `described` is not an object, it becomes the message.
    """
    fields = dict(described) if isinstance(described, Mapping) else {"message": str(described)}
    message, kind = str(fields.pop("message", "The server gave no reason.")), str(fields.pop("type", ""))
    code, param = fields.pop("code", None), fields.pop("param", None)
    status = status or STATUS_BY_TYPE.get(kind, 500)
    error_class = ERROR_BY_STATUS.get(status, ServerError if status >= 500 else APIError)
    return error_class(
        message, status_code=status, code=code, param=param, request_id=request_id or None, details=fields
    )


def _json_or_none(response: "httpx.Response") -> Any:
    try:
        return response.json()
    except ValueError:
        return None
