"""Defines the routes that tell how the server is: health, readiness, version, documentation and metrics.

Only the metrics on the server's own port need a key, the operator's, because they name every tenant. Those on the metrics
port need none.
"""

from contextlib import suppress

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

import graftwork
from graftwork.api.deps.readiness import Readiness
from graftwork.api.deps.resources import ForServer, ForSessions
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.api.openapi import docs_page, front_page
from graftwork.platform.answers.errors import Health, NotReady, Ready, Version
from graftwork.platform.errors import Unavailable
from graftwork.sessions.core.session import SessionStatus

router = APIRouter(tags=["operations"])

metrics_router = APIRouter(tags=["operations"], route_class=AdminRoute)

open_metrics_router = APIRouter()
"""The metrics route that needs no key. Only the application on the metrics port includes it."""

_SHOWN_STATUSES = [status for status in SessionStatus if status is not SessionStatus.EXPIRED]

_PLACES = {
    "console": "/console",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "health": "/healthz",
    "readiness": "/readyz",
    "metrics": "/metrics",
    "models": "/v1/models",
}
"""By name, the paths that a visitor may look for."""


@router.get("/health", include_in_schema=False)  # the same route under the name that vLLM uses
@router.get("/healthz")
async def get_health() -> Health:
    """Answer `ok` while the server's process runs."""
    return Health()


@router.get("/readyz", response_model=Ready, responses={503: {"model": NotReady, "description": "Not ready."}})
async def get_readiness(request: Request) -> JSONResponse:
    """Check that the database has the current schema and can store a row, and that the engine generates a token.

    If a check fails, the answer is a 503 with the reasons. Otherwise it names the degraded modes that are set.
    """
    readiness = request.app.state.readiness
    assert isinstance(readiness, Readiness)
    problems = await readiness.problems()
    if problems:
        return JSONResponse(NotReady(problems=problems).body(), status_code=503)
    return JSONResponse(Ready(degraded=readiness.degraded_modes()).body())


@router.get("/", include_in_schema=False)
async def get_root(request: Request) -> Response:
    """Tell a browser where to go, as a page with links, and a program, as JSON."""
    if "text/html" in request.headers.get("accept", ""):
        page, policy = front_page.render(places(request.app))
        return HTMLResponse(page, headers={"content-security-policy": policy})
    return JSONResponse({"name": "graftwork", "version": graftwork.__version__, **places(request.app)})


def places(app: FastAPI) -> dict[str, str]:
    """Returns the paths that the front page names, of those that this server has."""
    return {name: path for name, path in _PLACES.items() if path in app.state.paths}


@router.get("/docs", include_in_schema=False)
async def get_docs(request: Request) -> HTMLResponse:
    """Return the OpenAPI document as an HTML page."""
    page = docs_page.render(request.app.openapi())
    return HTMLResponse(page, headers={"content-security-policy": docs_page.CONTENT_SECURITY_POLICY})


@router.get("/version")
async def get_version() -> Version:
    """Get the version of this server."""
    return Version(version=graftwork.__version__)


@metrics_router.get("/metrics", response_class=PlainTextResponse)
@open_metrics_router.get("/metrics", response_class=PlainTextResponse)
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
