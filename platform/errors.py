"""Defines every error that a caller can receive, with its HTTP status.

    GraftworkError
    ├── InvalidRequest            400  the server cannot serve a value; `param` names its field
    │   └── ContextLengthExceeded 400  the prompt leaves no room for an answer in the model's context
    ├── ValidationFailed          422  a wrong body on this server's own routes, or a wrong adapter file
    ├── NotAuthenticated          401  the API key is wrong, expired or revoked
    ├── NotPermitted              403  the API key is valid, but does not have the permission
    ├── NotFound                  404  the object is unknown, or belongs to another tenant
    ├── RequestTimeout            408  the body of the request arrives too slowly
    ├── Conflict                  409  the object's present state does not allow the request
    ├── PayloadTooLarge           413  the request is too large
    ├── LimitExceeded             429  the request would exceed a limit of the caller
    │   └── BudgetSpent           429  the same, and waiting a short time does not help
    ├── CapacityContended         429  other requests use all capacity of the server now
    ├── Unavailable               503  the engine, or another part of the server, does not answer now
    ├── DeadlineExceeded          504  the request's time limit has passed
    └── InternalFailure           500  a bug of the server; the log has it under the request id

The class of an error decides the HTTP status. Each error tells whether a retry can help (`should_retry`). Errors of
other libraries are converted into these errors in the module that calls the library.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

DEVICE_LOST = "device_lost"
"""The code of the error that ends an engine's process, because its device can compute nothing after an error."""


class GraftworkError(Exception):
    """The base class of all errors that a caller can receive.

    `message` tells the caller what is wrong, and what to do about it.
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
    def exit_status(self) -> int:
        """The exit status of a program that this error ends: 75 if the program only has to be started again, else 1."""
        return 75 if self.code == DEVICE_LOST else 1

    @property
    def should_retry(self) -> bool:
        """Whether the same request may succeed if the caller sends it again."""
        return self.retry_after_s is not None

    @property
    def is_server_fault(self) -> bool:
        """Whether the server caused the error, and not the request. A request that ends like this costs nothing."""
        return self.status >= 500

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the error in OpenAI's form: `error` with message, type, param and code.

        The error's `details` are added as further fields of `error`.
        """
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.details}

    def headers(self) -> dict[str, str]:
        """Returns the HTTP headers that tell the client whether to retry.

        If waiting helps, these are `retry-after` and `retry-after-ms`. If not, it is `x-should-retry: false` for a
        status of 409 or 429, and no header for any other status.
        """
        if self.retry_after_s is not None:
            seconds = max(self.retry_after_s, 0.0)
            return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        return {"x-should-retry": "false"} if self.status in (408, 409, 429) else {}


class InvalidRequest(GraftworkError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for an answer. The message is OpenAI's, because clients search for its words.

    It ends with the code, because some clients search the text of the exception, and OpenAI's package puts only the
    message into it.
    """

    default_code = "context_length_exceeded"

    @classmethod
    def of_prompt(
        cls,
        prompt_tokens: int,
        context_tokens: int,
        param: str,
        *,
        max_tokens: int | None = None,
        is_exact: bool = True,
    ) -> Self:
        """Returns the error for a prompt that leaves no room for one token of an answer.

        `param` is the field of the prompt, and `max_tokens` is the client's limit on the answer. If `is_exact` is
        False, the prompt has at least `prompt_tokens` tokens.
        """
        start = f"This model's maximum context length is {context_tokens} tokens. However, "
        asked = max_tokens or 1
        if prompt_tokens > context_tokens:
            least = "" if is_exact else "at least "
            message = (
                f"{start}your {param} resulted in {least}{prompt_tokens} tokens. "
                f"Please reduce the length of the {param} ({cls.default_code})."
            )
        else:
            message = (
                f"{start}you requested {prompt_tokens + asked} tokens ({prompt_tokens} in the {param}, {asked} in the "
                f"completion). Please reduce the length of the {param} or completion ({cls.default_code})."
            )
        details = {"context_tokens": context_tokens, "prompt_tokens": prompt_tokens, "max_tokens": asked}
        return cls(message, param=param, details=details)


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


class RequestTimeout(GraftworkError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class Conflict(GraftworkError):
    status = 409
    type = "conflict_error"
    default_code = "conflict"


class PayloadTooLarge(GraftworkError):
    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class LimitExceeded(GraftworkError):
    """Raised if a request would exceed a limit of the caller.

    `rate_limit_headers` are HTTP headers that show each limit and how much of it is left. The quota keeper sets them.
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

    @property
    def is_server_fault(self) -> bool:
        return True


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


SERVER_FAULT_TYPES = frozenset(
    error_class.type for error_class in (CapacityContended, Unavailable, DeadlineExceeded, InternalFailure)
)
"""The values of `type` in the bodies of errors that are not the caller's fault."""


def error_classes() -> dict[str, type[GraftworkError]]:
    """Returns a dict that maps the name of each error class to the class. gRPC messages contain such a name."""
    found: dict[str, type[GraftworkError]] = {}
    waiting: list[type[GraftworkError]] = [GraftworkError]
    while waiting:
        error_class = waiting.pop()
        found[error_class.__name__] = error_class
        waiting.extend(error_class.__subclasses__())
    return found
