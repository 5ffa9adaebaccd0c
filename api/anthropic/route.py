"""Defines the route class of Anthropic's API: errors name Anthropic's fields, and answers have the header `request-id`.

Never writes an error: `api/http/error_forms.py` does.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from graftwork.api.anthropic.translate import with_anthropic_fields
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.response_headers import ANTHROPIC_REQUEST_ID
from graftwork.api.http.validation import as_invalid_request
from graftwork.platform.errors import GraftworkError, InvalidRequest, ValidationFailed


class AnthropicRoute(OpenAiRoute):
    """A tenant's route that follows Anthropic's API.

    Like an OpenAiRoute, it accepts a tenant's API key, and it answers an invalid body with the status 400.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            response = await handle(request)
            response.headers[ANTHROPIC_REQUEST_ID] = request.state.request_id
            return response

        return answer

    def as_route_error(self, error: InvalidRequest | ValidationFailed) -> GraftworkError:
        return with_anthropic_fields(as_invalid_request(error))
