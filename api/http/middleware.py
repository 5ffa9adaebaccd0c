"""Gives each request an id, and answers a request whose handler crashes.

RequestIdMiddleware is the outermost layer of the application. CrashMiddleware is the innermost one, so that the other
layers can add to its answer, as CORS does. Only CrashMiddleware may catch every exception.
Never tells the client more about an unexpected exception than the request's id. The log has the exception and the id.
Invariant: clients cannot choose the id, because usage records use the id.
"""

import logging
import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.api.http.error_forms import error_response
from graftwork.api.http.errors import internal_failure
from graftwork.api.http.response_headers import REQUEST_ID
from graftwork.platform.ids import new_id

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Paths that other machines request every few seconds. Requests for them are logged only at the debug level."""

CLIENT_CLOSED_REQUEST = 499

_OUTGOING = "outgoing"
"""The key in a request's state for its _OutgoingResponse."""


class RequestIdMiddleware:
    """ASGI middleware that adds `x-request-id` to every response, and logs the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req")
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[_OUTGOING] = outgoing = _OutgoingResponse(send, request_id)
        started_at = time.monotonic()
        try:
            await self._app(scope, receive, outgoing.send)
        except ClientDisconnect:
            outgoing.status = CLIENT_CLOSED_REQUEST  # only for the log, because the client has left
        finally:
            self._log(scope, request_id, outgoing.status, time.monotonic() - started_at)

    def _log(self, scope: Scope, request_id: str, status: int | None, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        fields = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
        logger.log(level, "request", extra=fields | {"seconds": round(seconds, 4)})


class CrashMiddleware:
    """ASGI middleware that answers a crash with a 500. Stands inside RequestIdMiddleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception:
            outgoing: _OutgoingResponse = scope["state"][_OUTGOING]
            logger.exception("request failed", extra={"request_id": outgoing.request_id, "path": scope["path"]})
            if outgoing.status is None:  # a response that has started cannot become an error
                await error_response(internal_failure(outgoing.request_id), scope)(scope, receive, send)


class _OutgoingResponse:
    """Adds the request id to a response, and remembers the response's status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (REQUEST_ID.encode(), self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)
