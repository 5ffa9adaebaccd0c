"""Turns errors into HTTP responses. `error_forms.py` writes their bodies.

Never adds `x-request-id`: the middleware adds this header to every response.
"""

from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from graftwork.api.http.error_forms import error_response, framework_error_response
from graftwork.api.http.methods import methods_at
from graftwork.api.http.validation import as_validation_failed, invalid_body
from graftwork.platform.errors import GraftworkError, InternalFailure, NotFound


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Makes the application answer each expected error with JSON. The middleware answers unexpected errors.

    `routes` are all routes of the application. They supply the `Allow` header of a 405.
    """

    async def answer_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return _wrong_method(request, methods_at(request.scope, routes))
        return _http_exception_response(request, error)

    app.add_exception_handler(GraftworkError, _answer_graftwork_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_exception)


def _wrong_method(request: Request, methods: Sequence[str]) -> JSONResponse:
    """Answers a wrong method with the methods of this path, in the message and in the header `allow`."""
    message = f"{request.url.path} does not take {request.method}: send {' or '.join(methods)}."
    headers = {"allow": ", ".join(methods)}
    return framework_error_response(
        request.scope, HTTPStatus.METHOD_NOT_ALLOWED, message, "method_not_allowed", headers
    )


def internal_failure(request_id: str) -> InternalFailure:
    """Returns the error for an unexpected failure.

    Its message has only the request's id. The log has the cause of the failure, with the same id.
    """
    return InternalFailure(f"The server failed on this request. Report it with the request id {request_id}.")


async def _answer_graftwork_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GraftworkError)
    return error_response(error, request.scope)


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(as_validation_failed(invalid_body(error)), request.scope)


def _http_exception_response(request: Request, error: HTTPException) -> JSONResponse:
    """Answers an error of the framework: an unknown route, or an invalid multipart body."""
    if error.status_code == HTTPStatus.NOT_FOUND:
        missing = NotFound(f"There is no route {request.url.path}.", code="unknown_route")
        return error_response(missing, request.scope)
    code = HTTPStatus(error.status_code).name.lower()
    return framework_error_response(request.scope, error.status_code, str(error.detail), code, error.headers)
