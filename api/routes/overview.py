"""Defines the routes that give one snapshot of what a server does, for consoles and `graftwork top`."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import Admin, ForOverview, ForSessions, UsageKey
from graftwork.api.deps.route_classes import AdminRoute, NativeRoute
from graftwork.api.http.streaming import EventStream, Write, heartbeats, named_event
from graftwork.api.openapi.declare import Responses, also
from graftwork.api.overview.board import OverviewBoard
from graftwork.api.overview.views import DEFAULT_ROWS, MAX_ROWS, Sort, View
from graftwork.platform.answers.overview import Overview
from graftwork.platform.ids import TenantId

admin_router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=AdminRoute)
router = APIRouter(prefix="/v1", tags=["usage"], route_class=NativeRoute)

_ANSWERS: Responses = {
    **also(stream="overview"),
    304: {"description": "Nothing has changed since the snapshot of `If-None-Match`."},
}
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
    return await _answer(request, board, view)


async def _follow(board: OverviewBoard, view: View, write: Write) -> None:
    async with heartbeats(write, _PING) as write_event:
        await board.follow(view, write_event)


async def _answer(request: Request, board: OverviewBoard, view: View) -> Response:
    snapshot = await board.get(view)
    headers = {"etag": snapshot.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == snapshot.etag:
        return Response(status_code=304, headers=headers)
    return Response(snapshot.body, media_type="application/json", headers=headers)
