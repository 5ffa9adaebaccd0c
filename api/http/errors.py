"""Errors as HTTP answers, all in one shape.

Owns how errors look on HTTP. The middleware adds `x-request-id` to every response, errors included.
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
    """Answer every error that reaches the application's border as JSON. The middleware answers unexpected ones.

    `routes` are all routes, for the `Allow` header of a wrong method.
    """

    async def answer_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = _http_exception_response(request, error)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["allow"] = ", ".join(_methods_at(request, routes))
        return response

    app.add_exception_handler(GraftworkError, _answer_graftwork_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_exception)


def _methods_at(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """Every method that a route at this path takes."""
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def error_response(error: GraftworkError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error_headers(error))


def error_headers(error: GraftworkError) -> dict[str, str]:
    """The headers of an error, in any shape."""
    return error.headers() | ({"www-authenticate": "Bearer"} if isinstance(error, NotAuthenticated) else {})


def internal_failure(request_id: str) -> InternalFailure:
    """The error of a bug. The caller learns only the id under which the log has it."""
    return InternalFailure(f"The server failed on this request. Report it with the request id {request_id}.")


async def _answer_graftwork_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GraftworkError)
    return error_response(error)


async def _answer_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(as_validation_failed(invalid_body(error)))


def _http_exception_response(request: Request, error: HTTPException) -> JSONResponse:
    """Answer what the framework itself refuses: unknown routes, wrong methods, unreadable multipart bodies."""
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFound(f"There is no route {request.url.path}.", code="unknown_route"))
    code = HTTPStatus(error.status_code).name.lower()
    body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)
