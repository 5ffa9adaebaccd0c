"""Turns errors into HTTP responses. Invariant: the bodies of all these responses have the same JSON fields.

Never adds `x-request-id`: the middleware adds this header to every response.
"""

from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from graftwork.api.http.validation import as_validation_failed, invalid_body
from graftwork.platform.errors import GraftworkError, InternalFailure, NotAuthenticated, NotFound


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Makes the application answer each expected error with JSON. The middleware answers unexpected errors.

    `routes` are all routes of the application. They supply the `Allow` header of a 405.
    """

    async def answer_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = _http_exception_response(request, error)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return _wrong_method(request, _methods_at(request, routes))
        return response

    app.add_exception_handler(GraftworkError, _answer_graftwork_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_exception)


def _methods_at(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """Returns all HTTP methods that the routes at this path accept."""
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def _wrong_method(request: Request, methods: Sequence[str]) -> JSONResponse:
    """Answers a wrong method with the methods of this path, in the message and in the header `allow`."""
    allowed = ", ".join(methods)
    message = f"{request.url.path} does not take {request.method}: send {' or '.join(methods)}."
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": "method_not_allowed"}
    return JSONResponse({"error": body}, status_code=HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": allowed})


def error_response(error: GraftworkError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error_headers(error))


def error_headers(error: GraftworkError) -> dict[str, str]:
    """Returns the HTTP headers of an error response. OpenAI's and Anthropic's form have the same headers."""
    return error.headers() | ({"www-authenticate": "Bearer"} if isinstance(error, NotAuthenticated) else {})


def internal_failure(request_id: str) -> InternalFailure:
    """Returns the error for an unexpected failure.

    Its message has only the request's id. The log has the cause of the failure, with the same id.
    """
    return InternalFailure(f"The server failed on this request. Report it with the request id {request_id}.")


async def _answer_graftwork_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GraftworkError)
    return error_response(error)


async def _answer_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(as_validation_failed(invalid_body(error)))


def _http_exception_response(request: Request, error: HTTPException) -> JSONResponse:
    """Answers an error of the framework: an unknown route, a wrong method, or an invalid multipart body."""
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFound(f"There is no route {request.url.path}.", code="unknown_route"))
    code = HTTPStatus(error.status_code).name.lower()
    body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)
