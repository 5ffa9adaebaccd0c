"""Defines the two routes for metrics.

The route on the server's port needs the operator's key. The route on the metrics port needs no key.
Metrics name every tenant. So a tenant's key cannot read them.
"""

from contextlib import suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from graftwork.api.deps.resources import ForServer, ForSessions
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.platform.errors import Unavailable
from graftwork.sessions.core.session import SessionStatus

_SHOWN_STATUSES = [status for status in SessionStatus if status is not SessionStatus.EXPIRED]

router = APIRouter(tags=["operations"], route_class=AdminRoute)

open_router = APIRouter()
"""The metrics route that needs no key. Only the application on the metrics port includes it."""


@router.get("/metrics", response_class=PlainTextResponse)
@open_router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(request: Request, resources: ForServer, sessions: ForSessions) -> Response:
    """Get the metrics as Prometheus text, or as OpenMetrics if the client asks for it. Needs the admin key.

    If the engine or the database does not answer, the metrics have the last figures that the server got from it.
    """
    with suppress(Unavailable):
        counts = await sessions.sessions.store.count_by_status()
        resources.telemetry.show_sessions({status: counts.get(status, 0) for status in _SHOWN_STATUSES})
    with suppress(Unavailable):  # /readyz and the age of vllm:lora_requests_info show that the engine does not answer
        resources.telemetry.observe_engine(await resources.engine.stats(), resources.clock.now())
    resources.telemetry.replicas.observe(resources.replicas.figures())
    text, content_type = resources.telemetry.render(request.headers.get("accept", ""))
    return Response(text, media_type=content_type)
