"""Errors as HTTP answers: every one leaves in the same shape, whoever raised it.

The request id is no business of this file: the envelope puts `x-request-id` on every response.
"""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from graftwork.api.http.validation import as_validation_failed, invalid_body
from graftwork.platform.errors import GraftworkError, InternalFailure, NotAuthenticated, NotFound


def install_error_handlers(app: FastAPI) -> None:
    """Every error that reaches the application's border leaves as JSON; the unexpected ones are the envelope's."""
    app.add_exception_handler(GraftworkError, _answer_graftwork_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)


def error_response(error: GraftworkError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error_headers(error))


def error_headers(error: GraftworkError) -> dict[str, str]:
    """What an error says beside its body, whatever shape that has."""
    return error.headers() | ({"www-authenticate": "Bearer"} if isinstance(error, NotAuthenticated) else {})


def internal_failure(request_id: str) -> InternalFailure:
    """What a caller learns of a bug: that it is ours, and under which id we can find it."""
    return InternalFailure(f"The server failed on this request. Report it with the request id {request_id}.")


async def _answer_graftwork_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GraftworkError)
    return error_response(error)


async def _answer_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(as_validation_failed(invalid_body(error)))


async def _answer_http_exception(request: Request, error: Exception) -> JSONResponse:
    """The framework's own refusals: unknown routes, wrong methods, unreadable multipart bodies."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFound(f"There is no route {request.url.path}.", code="unknown_route"))
    code = HTTPStatus(error.status_code).name.lower()
    body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)
