"""Describes error responses and headers for the OpenAPI document. Never raises an error and never sends a response.

Each error status has one response in OpenAI's form, and one in Anthropic's form.
"""

from typing import Any

from graftwork.api.http.response_headers import (
    ANTHROPIC_REQUEST_ID,
    AUTHENTICATE,
    HEADERS,
    ID_HEADERS,
    LIMIT_HEADERS,
    RETRY_HEADERS,
)
from graftwork.platform.answers.errors import AnthropicErrorAnswer, ErrorAnswer

ERRORS: dict[int, tuple[str, str, str, str, tuple[str, ...]]] = {
    400: ("BadRequest", "A value that cannot be served.", "invalid_request_error", "invalid_value", ()),
    401: (
        "Unauthorized",
        "The key is missing, wrong, expired or revoked.",
        "authentication_error",
        "invalid_api_key",
        (AUTHENTICATE,),
    ),
    403: ("Forbidden", "The key does not allow this.", "permission_error", "not_permitted", ()),
    404: ("NotFound", "It does not exist, or belongs to another tenant.", "not_found_error", "not_found", ()),
    408: ("RequestTimeout", "The body arrives too slowly.", "invalid_request_error", "request_timeout", RETRY_HEADERS),
    409: ("Conflict", "The state does not allow this now.", "conflict_error", "conflict", RETRY_HEADERS),
    413: ("PayloadTooLarge", "The body is too large.", "invalid_request_error", "payload_too_large", ()),
    422: ("UnprocessableContent", "The request is not valid.", "invalid_request_error", "validation_failed", ()),
    429: (
        "TooManyRequests",
        "The tenant's limit is reached, or the engine is full.",
        "rate_limit_error",
        "rate_limit_exceeded",
        (*RETRY_HEADERS, *LIMIT_HEADERS),
    ),
    500: ("InternalServerError", "The server failed.", "internal_error", "internal_error", ()),
    503: ("ServiceUnavailable", "No engine can serve this now.", "overloaded_error", "no_capacity", RETRY_HEADERS),
    504: ("GatewayTimeout", "The request took too long.", "timeout_error", "deadline_exceeded", ()),
}
"""Maps each status to the component's name, its meaning, the error's `type` and `code`, and its extra headers."""


def header_components() -> dict[str, Any]:
    """Returns the definition of every response header, for `#/components/headers`."""
    return {
        name: {"description": header.meaning, "schema": {"type": "string"}, "example": header.example}
        for name, header in HEADERS.items()
    }


def header_references(*names: str) -> dict[str, Any]:
    """Returns references to the definitions of the headers `names`, for one response in the document."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def error_components() -> dict[str, Any]:
    """Returns the definitions of all error responses, for `#/components/responses`.

    The names of responses in Anthropic's form begin with `Anthropic`.
    """
    found: dict[str, Any] = {}
    for name, meaning, kind, code, headers in ERRORS.values():
        fields = {"message": meaning, "type": kind, "param": None, "code": code}
        found[name] = _response(meaning, ErrorAnswer.__name__, {"error": fields}, (*ID_HEADERS, *headers))
        theirs = {"type": "error", "error": {"type": kind, "message": meaning}, "request_id": "req_01hzx"}
        found[f"Anthropic{name}"] = _response(
            meaning, AnthropicErrorAnswer.__name__, theirs, (*ID_HEADERS, ANTHROPIC_REQUEST_ID, *headers)
        )
    return found


def error_reference(status: int, *, is_anthropic: bool = False) -> dict[str, str]:
    """Returns the reference to the definition of the error response with this status."""
    prefix = "Anthropic" if is_anthropic else ""
    return {"$ref": f"#/components/responses/{prefix}{ERRORS[status][0]}"}


def _response(meaning: str, schema: str, example: dict[str, Any], headers: tuple[str, ...]) -> dict[str, Any]:
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}
    return {
        "description": meaning,
        "headers": header_references(*headers),
        "content": {"application/json": content},
    }
