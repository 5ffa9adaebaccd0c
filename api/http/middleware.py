"""The outermost layer of the application: a request id for every request, and an answer whatever happens inside.

One of the two places that may catch everything: an unexpected exception is logged under the request id, and the
caller is told nothing but that id. The id is always ours, because the usage ledger counts by it.
"""

import logging
import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.api.http.errors import error_response, internal_failure
from graftwork.platform.ids import new_id

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every few seconds by machines; logged at debug."""

CLIENT_CLOSED_REQUEST = 499


class RequestIdMiddleware:
    """ASGI middleware; adds `x-request-id` to every response and turns a crash into a 500 in our shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        outgoing = _OutgoingResponse(send, request_id)
        started_at = time.monotonic()
        try:
            await self._app(scope, receive, outgoing.send)
        except ClientDisconnect:
            outgoing.status = CLIENT_CLOSED_REQUEST  # for the log: nobody is there to read an answer
        except Exception:
            logger.exception("request failed", extra={"request_id": request_id, "path": scope["path"]})
            await self._answer_failure(scope, receive, outgoing)
        finally:
            self._log(scope, request_id, outgoing.status, time.monotonic() - started_at)

    async def _answer_failure(self, scope: Scope, receive: Receive, outgoing: "_OutgoingResponse") -> None:
        if outgoing.status is None:  # once a body has begun there is no way to take it back
            await error_response(internal_failure(outgoing.request_id))(scope, receive, outgoing.send)

    def _log(self, scope: Scope, request_id: str, status: int | None, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        fields = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
        logger.log(level, "request", extra=fields | {"seconds": round(seconds, 4)})


class _OutgoingResponse:
    """Watches what is sent: the status, and the header that every response must have."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)
