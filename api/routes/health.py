"""Defines the routes for health, readiness, metrics, version and documentation. They need no key."""

from contextlib import suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

import graftwork
from graftwork.api.deps.readiness import Readiness
from graftwork.api.deps.resources import ForServer, ForSessions
from graftwork.api.openapi import docs_page
from graftwork.platform.answers.errors import Health, NotReady, Ready, Version
from graftwork.platform.errors import Unavailable
from graftwork.sessions.core.session import SessionStatus

_SHOWN_STATUSES = [status for status in SessionStatus if status is not SessionStatus.EXPIRED]

router = APIRouter(tags=["operations"])


@router.get("/health", include_in_schema=False)  # the same route under the name that vLLM uses
@router.get("/healthz")
async def get_health() -> Health:
    """Answer `ok` while the server's process runs."""
    return Health()


@router.get("/readyz", response_model=Ready, responses={503: {"model": NotReady, "description": "Not ready."}})
async def get_readiness(request: Request) -> JSONResponse:
    """Check that the database schema is current, and that the engine generates a token.

    If a check fails, the answer is a 503 with the reasons.
    """
    readiness = request.app.state.readiness
    assert isinstance(readiness, Readiness)
    problems = await readiness.problems()
    if problems:
        return JSONResponse(NotReady(problems=problems).body(), status_code=503)
    return JSONResponse(Ready().body())


@router.get("/docs", include_in_schema=False)
async def get_docs(request: Request) -> HTMLResponse:
    """Return the OpenAPI document as an HTML page."""
    page = docs_page.render(request.app.openapi())
    return HTMLResponse(page, headers={"content-security-policy": docs_page.CONTENT_SECURITY_POLICY})


@router.get("/version")
async def get_version() -> Version:
    """Get the version of this server."""
    return Version(version=graftwork.__version__)


@router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(resources: ForServer, sessions: ForSessions) -> Response:
    """Get the metrics as Prometheus text.

    If the engine or the database does not answer, its figures are those of its last answer.
    """
    with suppress(Unavailable):
        counts = await sessions.sessions.store.count_by_status()
        resources.telemetry.show_sessions({status: counts.get(status, 0) for status in _SHOWN_STATUSES})
    with suppress(Unavailable):  # /readyz and the age of vllm:lora_requests_info show that the engine does not answer
        resources.telemetry.observe_engine(await resources.engine.stats(), resources.clock.now())
    text, content_type = resources.telemetry.render()
    return Response(text, media_type=content_type)
