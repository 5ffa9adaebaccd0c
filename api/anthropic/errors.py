"""Builds errors in Anthropic's form, for the routes of Anthropic's API.

Owns the body and the header `request-id`. Never changes a status: the statuses are those of OpenAI-compatible routes.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.anthropic.translate import with_anthropic_fields
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.errors import error_headers
from graftwork.api.http.validation import as_invalid_request
from graftwork.platform.errors import ContextLengthExceeded, GraftworkError, InvalidRequest, ValidationFailed

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Maps an HTTP status to Anthropic's type of error. Any other status has the type `api_error`."""


def anthropic_error(error: GraftworkError) -> dict[str, Any]:
    """Converts an error to Anthropic's JSON form.

    This form is the body of an error response, and the data of an `error` event in a stream.
    """
    message = _too_long(error) if isinstance(error, ContextLengthExceeded) else error.message
    return {"type": "error", "error": {"type": _TYPES.get(error.status, "api_error"), "message": message}}


def _too_long(error: ContextLengthExceeded) -> str:
    """Returns Anthropic's own message for a prompt that leaves no room for an answer. Clients read its numbers."""
    prompt, most, asked = (error.details.get(name) for name in ("prompt_tokens", "context_tokens", "max_tokens"))
    if prompt is None or most is None:
        return error.message
    if prompt > most:
        return f"prompt is too long: {prompt} tokens > {most} maximum"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {most}"


class AnthropicRoute(OpenAiRoute):
    """A tenant's route that follows Anthropic's API. Its errors have Anthropic's form.

    Like an OpenAiRoute, it accepts a tenant's API key, and it answers an invalid body with the status 400.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except GraftworkError as error:
                body = anthropic_error(error) | {"request_id": request.state.request_id}
                response = JSONResponse(body, status_code=error.status, headers=error_headers(error))
            response.headers["request-id"] = request.state.request_id
            return response

        return answer

    def as_route_error(self, error: InvalidRequest | ValidationFailed) -> GraftworkError:
        if isinstance(error, ContextLengthExceeded):
            return error
        return with_anthropic_fields(as_invalid_request(error))
