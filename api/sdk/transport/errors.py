"""Every error that the SDK raises.

    GraftworkError
    ├── ConfigurationError          nothing was sent: a key, a folder or an argument is missing
    ├── ToolLoopError               `session.run` took more turns than it was allowed to; `turns` holds them
    ├── TurnFailedError             the turn ended as failed or cancelled; `turn` holds it
    └── APIError                    status_code, code, param, request_id, message, details
        ├── APIConnectionError      no answer, or one that broke off; status_code is None
        │   └── APITimeoutError     the answer took longer than `timeout`
        ├── BadRequestError         400  a value that cannot be served; `param` names it
        ├── AuthenticationError     401  the key is wrong, expired or revoked
        ├── PermissionDeniedError   403  the key is right, but not for this
        ├── NotFoundError           404  unknown, or another tenant's
        ├── ConflictError           409  the state has moved on; `details` says where it is now
        ├── PayloadTooLargeError    413
        ├── ValidationError         422  a field or an adapter's file is wrong; `param` names it
        ├── RateLimitError          429  your limit, or capacity that others hold now
        └── ServerError             5xx  the server failed, or has no engine

The statuses are those of `graftwork.platform.errors`, which the SDK does not import: it runs without the server.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line imports these errors on every start, and httpx only where it talks to a server
    import httpx


class GraftworkError(Exception):
    """Base of all errors of the SDK. `message` says what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigurationError(GraftworkError):
    """A key, a folder or an argument is missing. Nothing was sent."""


class ToolLoopError(GraftworkError):
    """The model still called tools in the last allowed turn. The session waits for their outputs."""

    def __init__(self, message: str, turns: Sequence[Any]) -> None:
        super().__init__(message)
        self.turns = tuple(turns)


class TurnFailedError(GraftworkError):
    """A turn of `session.run` ended without an answer."""

    def __init__(self, message: str, turn: Any) -> None:
        super().__init__(message)
        self.turn = turn


class APIError(GraftworkError):
    """The server answered with an error, or did not answer."""

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
    """No server answers, or the connection broke."""


class APITimeoutError(APIConnectionError):
    """The server took longer than the client's timeout."""


class BadRequestError(APIError):
    """400: a value that cannot be served. `param` names it."""


class AuthenticationError(APIError):
    """401: the key is missing, wrong, expired or revoked."""


class PermissionDeniedError(APIError):
    """403: the key does not allow this."""


class NotFoundError(APIError):
    """404: it does not exist, or belongs to another tenant."""


class ConflictError(APIError):
    """409: the state does not allow this now. `details` has the current state."""


class PayloadTooLargeError(APIError):
    """413: the body is too large."""


class ValidationError(APIError):
    """422: a field or an adapter's file is wrong. `param` names it."""


class RateLimitError(APIError):
    """429: a limit is reached, or the engine is full."""


class ServerError(APIError):
    """500 and above: the server failed, or no engine can serve."""


ERROR_BY_STATUS: Mapping[int, type[APIError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
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
"""The status of an `error` event in a stream, by its type."""


def error_from_response(response: "httpx.Response") -> APIError:
    """The typed error of an unsuccessful answer. Its body must have been read."""
    body = _json_or_none(response)
    described = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    fallback = response.text.strip()[:500] or response.reason_phrase
    return error_from_description(described or fallback, response.status_code, response.headers.get("x-request-id"))


def error_from_description(described: object, status: int | None, request_id: str | None = None) -> APIError:
    """The typed error of `{"message", "type", "param", "code", …}`. Any other value becomes the message."""
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
