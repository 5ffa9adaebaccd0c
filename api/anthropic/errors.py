"""Errors in Anthropic's shape, for the routes of its API.

The statuses are the same as on other routes. Only the body differs, and the request id is in `request-id` too.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.anthropic.translate import with_anthropic_fields
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.errors import error_headers
from graftwork.api.http.validation import as_invalid_request
from graftwork.platform.errors import GraftworkError, InvalidRequest, ValidationFailed

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
"""The error type by status. Any other status is an `api_error`."""


def anthropic_error(error: GraftworkError) -> dict[str, Any]:
    """An error as the body of an answer, or as the data of an `error` event."""
    return {"type": "error", "error": {"type": _TYPES.get(error.status, "api_error"), "message": error.message}}


class AnthropicRoute(OpenAiRoute):
    """A tenant's route of Anthropic's API. Keys and statuses are those of OpenAiRoute."""

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
        return with_anthropic_fields(as_invalid_request(error))
