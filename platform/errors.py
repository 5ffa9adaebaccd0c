"""Defines every error that a caller can receive, with its HTTP status.

    GraftworkError
    ├── InvalidRequest            400  a value that cannot be served; `param` names the field
    │   └── ContextLengthExceeded 400  the prompt and the answer do not fit the model's context
    ├── ValidationFailed          422  a body on a native or admin route, or an adapter's files
    ├── NotAuthenticated          401  the key is wrong, expired or revoked
    ├── NotPermitted              403  the key is valid, but must not do this
    ├── NotFound                  404  unknown, or another tenant's; the answer is the same
    ├── Conflict                  409  the state has moved on; `details` says where it is now
    ├── PayloadTooLarge           413
    ├── LimitExceeded             429  your own limit
    │   └── BudgetSpent           429  your own limit, and waiting does not help
    ├── CapacityContended         429  others use all capacity now
    ├── Unavailable               503  no engine can serve this at present
    ├── DeadlineExceeded          504  the time limit of the request is over
    └── InternalFailure           500  a bug of the server; the log has it under the request id

An error owns its status, its code and whether a retry can help; no other module decides these.
Errors of other libraries are converted into these errors in the module that calls the library.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class GraftworkError(Exception):
    """The base class of all errors that a caller can receive. `message` tells the caller what is wrong and what to do
    about it.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})

    @property
    def should_retry(self) -> bool:
        """Whether sending the same request again may succeed."""
        return self.retry_after_s is not None

    def body(self) -> dict[str, Any]:
        """Returns the error as JSON in OpenAI's form. `details` are added to the four fields of that form."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.details}

    def headers(self) -> dict[str, str]:
        """Returns the retry headers: `retry-after` if waiting helps, else `x-should-retry: false` for a status 409 or
        429.
        """
        if self.retry_after_s is not None:
            seconds = max(self.retry_after_s, 0.0)
            return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        return {"x-should-retry": "false"} if self.status in (409, 429) else {}


class InvalidRequest(GraftworkError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class ValidationFailed(GraftworkError):
    status = 422
    type = "invalid_request_error"
    default_code = "validation_failed"


class NotAuthenticated(GraftworkError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class NotPermitted(GraftworkError):
    status = 403
    type = "permission_error"
    default_code = "not_permitted"


class NotFound(GraftworkError):
    status = 404
    type = "not_found_error"
    default_code = "not_found"


class Conflict(GraftworkError):
    status = 409
    type = "conflict_error"
    default_code = "conflict"


class PayloadTooLarge(GraftworkError):
    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class LimitExceeded(GraftworkError):
    """A limit of the caller is reached.

    `rate_limit_headers` tell how much of each limit is used. The quota keeper sets them.
    """

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    rate_limit_headers: Mapping[str, str] = MappingProxyType({})

    def headers(self) -> dict[str, str]:
        return super().headers() | dict(self.rate_limit_headers)


class BudgetSpent(LimitExceeded):
    type = "insufficient_quota"
    default_code = "quota_exceeded"


class CapacityContended(GraftworkError):
    status = 429
    type = "overloaded_error"
    default_code = "queue_full"


class Unavailable(GraftworkError):
    status = 503
    type = "overloaded_error"
    default_code = "no_capacity"


class DeadlineExceeded(GraftworkError):
    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"


class InternalFailure(GraftworkError):
    status = 500
    type = "internal_error"
    default_code = "internal_error"


def error_classes() -> dict[str, type[GraftworkError]]:
    """Returns every error class by its name. gRPC messages name an error by its class."""
    found: dict[str, type[GraftworkError]] = {}
    waiting: list[type[GraftworkError]] = [GraftworkError]
    while waiting:
        error_class = waiting.pop()
        found[error_class.__name__] = error_class
        waiting.extend(error_class.__subclasses__())
    return found
