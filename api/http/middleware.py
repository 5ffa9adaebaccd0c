"""Gives each request an id, and answers a request whose handler crashes.

RequestIdMiddleware is the outermost layer of the application. CrashMiddleware is the innermost one, so that the other
layers can add to its answer, as CORS does. Only CrashMiddleware may catch every exception.
Never tells the client more about an unexpected exception than the request's id. The log has the exception and the id.
Invariant: clients cannot choose the id, because usage records use the id. A client's own `x-request-id` is repeated in
its answer, and the server's id then has a header of its own.
"""

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.api.http.client_presence import WATCH_CLIENT
from graftwork.api.http.error_forms import error_response
from graftwork.api.http.errors import internal_failure
from graftwork.api.http.response_headers import REQUEST_ID, SERVER_REQUEST_ID, TRACE_ID
from graftwork.api.http.streaming import TRACE, WRITE_BODY
from graftwork.platform.clock import SystemClock
from graftwork.platform.ids import new_id
from graftwork.platform.tracing.request_line import request_fields
from graftwork.platform.tracing.request_trace import RequestTrace
from graftwork.platform.tracing.trace_book import TraceBook
from graftwork.platform.tracing.trace_ids import TraceIds

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Paths that other machines request every few seconds. Requests for them are logged only at the debug level."""

POLLED_PATHS = frozenset({"/v1/overview", "/v1/admin/overview"})
"""Paths that each watcher requests every second. The same goes for them, unless they are refused or fail."""

CLIENT_CLOSED_REQUEST = 499

TRACES = "traces"
"""The name of the TraceBook in the state of an application."""

_REQUEST_ID, _TRACE_ID, _SERVER_REQUEST_ID = REQUEST_ID.encode(), TRACE_ID.encode(), SERVER_REQUEST_ID.encode()

_OUTGOING = "outgoing"
"""The key in a request's state for its _OutgoingResponse."""


class RequestIdMiddleware:
    """ASGI middleware that adds the ids of the request to every response, and logs the request.

    The line of the log is written when both the response and the work of the request have ended: a turn may go on after
    its client has left.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._no_book = TraceBook(SystemClock())
        """For an application whose services are not open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        book = getattr(scope["app"].state, TRACES, self._no_book)
        trace = book.begin(new_id("req"), scope)
        trace.at_end(_log)
        state = scope.setdefault("state", {})
        state["request_id"], state[TRACE] = trace.ids.request_id, trace
        state[_OUTGOING] = outgoing = _OutgoingResponse(send, trace.ids)
        try:
            await self._app(scope, receive, outgoing.send)
        except ClientDisconnect:
            outgoing.status = CLIENT_CLOSED_REQUEST  # only for the log, because the client has left
        finally:
            trace.answered(outgoing.status)
            for way_to_the_connection in (_OUTGOING, WRITE_BODY, WATCH_CLIENT):  # it refers to this state: a cycle
                state.pop(way_to_the_connection, None)


def logs_polls() -> bool:
    """Returns whether also the polls that succeed have a line in the log."""
    return logger.isEnabledFor(logging.DEBUG)


def _log(trace: RequestTrace) -> None:
    is_quiet = trace.path in QUIET_PATHS or (trace.path in POLLED_PATHS and (trace.status or 500) < 400)
    level = logging.DEBUG if is_quiet else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra=request_fields(trace))


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
            ids = outgoing.ids
            extra = {"request_id": ids.request_id, "trace_id": ids.trace_id, "path": scope["path"]}
            logger.exception("request failed", extra=extra)
            if outgoing.status is None:  # a response that has started cannot become an error
                await error_response(internal_failure(outgoing.ids.request_id), scope)(scope, receive, send)


class _OutgoingResponse:
    """Adds the request's ids to a response, and remembers the response's status."""

    def __init__(self, send: Send, ids: TraceIds) -> None:
        self._send = send
        self.ids = ids
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._headers()]}
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        ids = self.ids
        headers = [(_REQUEST_ID, ids.shown_id.encode()), (_TRACE_ID, ids.trace_id.encode())]
        if ids.client_request_id is not None:
            headers.append((_SERVER_REQUEST_ID, ids.request_id.encode()))
        return headers
