"""Defines the routes that give one snapshot of what a server does, for consoles and `graftwork top`.

A watcher asks the same again every second. So a query that was read and checked once is not read again: after the key,
the answer is the shared bytes of the snapshot. The operator's polls do not even reach the router (`KnownPolls`).
"""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import Admin, ForOverview, ForSessions, UsageKey, resources_of
from graftwork.api.deps.route_classes import AdminRoute, AuthenticatedRoute, Handler, NativeRoute
from graftwork.api.http.request import BoundedRequest
from graftwork.api.http.streaming import EventStream, Write, heartbeats, named_event
from graftwork.api.openapi.declare import Responses, also
from graftwork.api.overview.board import OverviewBoard, Snapshot
from graftwork.api.overview.views import DEFAULT_ROWS, MAX_ROWS, Sort, View
from graftwork.platform.answers.overview import Overview
from graftwork.platform.ids import TenantId
from graftwork.platform.keys.scopes import Scope
from graftwork.platform.tenancy.principals import Principal


class _PolledRoute(AuthenticatedRoute):
    """A route that reads each query string once. Its handler remembers what the query asks for."""

    async def run(self, request: BoundedRequest, handle: Handler) -> Response:
        principal, board = request.state.principal, resources_of(request).overview
        tenant_id = None
        if isinstance(principal, Principal):
            principal.require(Scope.USAGE)
            tenant_id = principal.tenant_id
        view = board.known_queries.get(tenant_id, request.scope["query_string"])
        return await super().run(request, handle) if view is None else await _answer(request, board, view)


class _TenantPollRoute(_PolledRoute, NativeRoute):
    """A polled route of tenants."""


class _AdminPollRoute(_PolledRoute, AdminRoute):
    """A polled route of the operator."""


admin_router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=_AdminPollRoute)
router = APIRouter(prefix="/v1", tags=["usage"], route_class=_TenantPollRoute)

_ANSWERS: Responses = {
    **also(stream="overview"),
    304: {"description": "Nothing has changed since the snapshot of `If-None-Match`."},
}
_OPERATORS_PATH = "/v1/admin/overview"
_PING = named_event("ping", {"type": "ping"})
_Rows = Annotated[int, Query(ge=1, le=MAX_ROWS)]
_Skipped = Annotated[int, Query(ge=0, le=1_000_000)]
_Find = Annotated[str, Query(max_length=200)]


@admin_router.get("/overview", response_model=Overview, responses=_ANSWERS)
async def get_server_overview(
    request: Request,
    board: ForOverview,
    _: Admin,
    sort: Sort = Sort.ACTIVITY,
    rows: _Rows = DEFAULT_ROWS,
    tenants: _Skipped = 0,
    adapters: _Skipped = 0,
    sessions: _Skipped = 0,
    find: _Find = "",
    tenant_id: Annotated[str | None, Query(max_length=200)] = None,
    stream: bool = False,
) -> Response:
    """Get one snapshot of the server: its engines, tenants, adapters and live sessions.

    Each list has at most `rows` rows. `tenants`, `adapters` and `sessions` say how many rows of each list to leave out
    at its beginning. `sort` orders tenants and adapters, `find` keeps rows whose name or id has this text, and
    `tenant_id` selects one tenant. A snapshot is made about once a second. With `If-None-Match`, an unchanged one is a
    304 without a body. With `stream`, each new snapshot is an event of one stream, which costs the server much less.
    """
    only = None if tenant_id is None else TenantId(tenant_id)
    view = View(only, True, sort, rows, tenants, adapters, sessions, find.lower())
    if stream:
        return EventStream(partial(_follow, board, view))
    board.known_queries.add(None, request.scope["query_string"], view)
    return await _answer(request, board, view)


@router.get("/overview", response_model=Overview, responses=_ANSWERS)
async def get_overview(
    request: Request,
    board: ForOverview,
    served: ForSessions,
    principal: UsageKey,
    sort: Sort = Sort.ACTIVITY,
    rows: _Rows = DEFAULT_ROWS,
    adapters: _Skipped = 0,
    sessions: _Skipped = 0,
    find: _Find = "",
    stream: bool = False,
) -> Response:
    """Get one snapshot of what the tenant does: its figures, adapters and live sessions. It has no engines.

    The parameters, the stream and the 304 are those of the operator's route.
    """
    view = View(principal.tenant_id, False, sort, rows, 0, adapters, sessions, find.lower())
    if stream:
        return read_stream(served.work, principal, partial(_follow, board, view))
    board.known_queries.add(principal.tenant_id, request.scope["query_string"], view)
    return await _answer(request, board, view)


class KnownPolls:
    """ASGI middleware that answers the polls of the operator whose query is known and whose snapshot is fresh, if they
    have the admin key. Everything else goes to the application, with its checks and its errors.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        is_poll = scope["type"] == "http" and scope["path"] == _OPERATORS_PATH and scope["method"] == "GET"
        known = _known_answer(Request(scope)) if is_poll else None
        await (self._app if known is None else known)(scope, receive, send)


def _known_answer(request: Request) -> Response | None:
    resources = resources_of(request)
    view = resources.overview.known_queries.get(None, request.scope["query_string"])
    snapshot = None if view is None else resources.overview.fresh(view)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if snapshot is None or scheme.lower() != "bearer" or not resources.server.gate.is_admin_key(key.strip()):
        return None
    return _respond(request, snapshot)


async def _follow(board: OverviewBoard, view: View, write: Write) -> None:
    async with heartbeats(write, _PING) as write_event:
        await board.follow(view, write_event)


async def _answer(request: Request, board: OverviewBoard, view: View) -> Response:
    return _respond(request, await board.get(view))


def _respond(request: Request, snapshot: Snapshot) -> Response:
    takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
    headers = {"cache-control": "no-cache", "vary": "accept-encoding"}
    headers["etag"] = snapshot.compressed_etag if takes_gzip else snapshot.etag
    if snapshot.is_named_in(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if not takes_gzip:
        return Response(snapshot.body, media_type="application/json", headers=headers)
    return Response(snapshot.compressed, media_type="application/json", headers={**headers, "content-encoding": "gzip"})
