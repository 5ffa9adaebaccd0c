"""Defines the routes that give one snapshot of what a server does, for consoles and `graftwork top`.

A watcher asks the same again every second. So a query that was read and checked once is not read again: after the key,
the answer is the shared bytes of the snapshot. On one connection, the same poll is not even parsed (`api/http/repeats.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from graftwork.api.deps.direct_calls import Handler
from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import Admin, ForOverview, ForSessions, UsageKey, resources_of
from graftwork.api.deps.route_classes import AdminRoute, AuthenticatedRoute, NativeRoute
from graftwork.api.http.middleware import logs_polls
from graftwork.api.http.repeats import Reply, offer_repeat
from graftwork.api.http.request import BoundedRequest, client_address, presented_key
from graftwork.api.http.streaming import EventStream, Write, heartbeats, named_event
from graftwork.api.openapi.declare import Responses, also
from graftwork.api.overview.board import OverviewBoard, SharedSnapshot
from graftwork.api.overview.views import DEFAULT_ROWS, MAX_ROWS, Sort, View
from graftwork.platform.answers.overview import Overview
from graftwork.platform.ids import TenantId
from graftwork.platform.keys.scopes import Scope
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tracing.trace_rules import TraceRules


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


async def _follow(board: OverviewBoard, view: View, write: Write) -> None:
    async with heartbeats(write, _PING) as write_event:
        await board.follow(view, write_event)


async def _answer(request: Request, board: OverviewBoard, view: View) -> Response:
    takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
    snapshot = await board.get(view)
    server, principal = resources_of(request).server, request.state.principal
    is_right = server.gate.recheck(principal, presented_key(request), client_address(request))
    if is_right is not None:
        tenant_id = principal.tenant_id if isinstance(principal, Principal) else None
        repeat = _Repeat(board.shared(view), takes_gzip, is_right, server.traces.rules, tenant_id)
        offer_repeat(request.scope, repeat)
    reply = snapshot.reply(takes_gzip, request.headers.get("if-none-match", ""))
    return Response(reply.body or None, reply.status, reply.headers)


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Answers the same poll again."""

    shared: SharedSnapshot
    takes_gzip: bool
    is_right: Callable[[], bool]
    """Whether the key still has its rights."""
    rules: TraceRules
    tenant_id: TenantId | None

    def __call__(self, if_none_match: str) -> Reply | None:
        """Returns the answer; None if there is no fresh one, if the key has lost rights, or if somebody wants to see the
        request in traces or in the log.
        """
        snapshot = self.shared.fresh()
        if snapshot is None or not self.is_right() or logs_polls():
            return None
        if self.tenant_id is not None and self.rules.may_want(self.tenant_id):
            return None
        return snapshot.reply(self.takes_gzip, if_none_match)
