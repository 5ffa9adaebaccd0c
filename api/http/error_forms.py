"""Writes errors in the form that the client of a route reads: OpenAI's, or Anthropic's.

Owns which requests get Anthropic's form, and that form. Never chooses a status: an error has the same status in both
forms. Anthropic's clients ask for models with the header `anthropic-version`, which OpenAI's clients never send:

    /v1/messages, and every path below it             Anthropic's form
    /v1/models with the header `anthropic-version`    Anthropic's form
    everything else                                   OpenAI's form
"""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Scope

from graftwork.api.http.response_headers import ANTHROPIC_REQUEST_ID, AUTHENTICATE
from graftwork.platform.errors import ContextLengthExceeded, GraftworkError, NotAuthenticated

VERSION_HEADER = "anthropic-version"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Maps an HTTP status to Anthropic's type of error. Other statuses below 500 are `invalid_request_error`."""


def wants_anthropic(scope: Scope) -> bool:
    """Returns whether the answer to this request has Anthropic's form."""
    path = scope["path"]
    if _is_below(path, "/v1/messages"):
        return True
    return _is_below(path, "/v1/models") and VERSION_HEADER in Headers(scope=scope)


def error_response(error: GraftworkError, scope: Scope) -> JSONResponse:
    """Returns the response for an error, in the form of the request's API."""
    if wants_anthropic(scope):
        return _anthropic_response(scope, error.status, anthropic_error(error), _headers(error))
    return JSONResponse(error.body(), status_code=error.status, headers=_headers(error))


def framework_error_response(
    scope: Scope, status: int, message: str, code: str, headers: Mapping[str, str] | None
) -> JSONResponse:
    """Returns the response for an error of the framework, such as a wrong method, in the form of the request's API."""
    if wants_anthropic(scope):
        return _anthropic_response(scope, status, _anthropic_body(status, message, {}), headers)
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": fields}, status_code=status, headers=headers)


def anthropic_error(error: GraftworkError) -> dict[str, Any]:
    """Converts an error to Anthropic's JSON form.

    This form is the body of an error response, and the data of an `error` event in a stream.
    """
    message = _too_long(error) if isinstance(error, ContextLengthExceeded) else error.message
    details = {"details": error.details} if "error_code" in error.details else {}
    return _anthropic_body(error.status, message, details)


def _anthropic_body(status: int, message: str, more: Mapping[str, Any]) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, **more}}


def _anthropic_response(
    scope: Scope, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None
) -> JSONResponse:
    request_id = scope["state"]["request_id"]
    sent = {**(headers or {}), ANTHROPIC_REQUEST_ID: request_id}
    return JSONResponse({**body, "request_id": request_id}, status_code=status, headers=sent)


def _headers(error: GraftworkError) -> dict[str, str]:
    return error.headers() | ({AUTHENTICATE: "Bearer"} if isinstance(error, NotAuthenticated) else {})


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _too_long(error: ContextLengthExceeded) -> str:
    """Returns Anthropic's own message for a prompt that leaves no room for an answer. Clients read its numbers."""
    prompt, most, asked = (error.details.get(name) for name in ("prompt_tokens", "context_tokens", "max_tokens"))
    if prompt is None or most is None:
        return error.message
    if prompt > most:
        return f"prompt is too long: {prompt} tokens > {most} maximum"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {most}"
