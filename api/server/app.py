"""Builds the HTTP application: routes, error handlers and middleware, with the services of one process.

Owns the list of routes. Never loads torch, and never opens a file or connection when the module is imported.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

import graftwork
from graftwork.api.batches import batch_routes, file_routes, message_batch_routes
from graftwork.api.deps.readiness import Readiness
from graftwork.api.deps.resources import Resources
from graftwork.api.http.cors import allow_origins
from graftwork.api.http.errors import install_error_handlers
from graftwork.api.http.methods import HeadMiddleware, refuse_methods_of_wider_paths
from graftwork.api.http.middleware import CrashMiddleware, RequestIdMiddleware
from graftwork.api.openapi.document import complete
from graftwork.api.people import admin_routes, browser_routes, tenant_routes, token_routes
from graftwork.api.rights import export_routes, retention_routes
from graftwork.api.routes import (
    adapters,
    admin,
    aliases,
    chat,
    completions,
    console,
    conversations,
    embeddings,
    health,
    messages,
    models,
    overview,
    prices,
    responses,
    session_history,
    session_turns,
    sessions,
    timelines,
    tokenization,
    usage,
)
from graftwork.api.routes.tenancy import organisations, quotas, webhooks
from graftwork.api.server.wiring import open_resources
from graftwork.api.uploads import part_routes, upload_routes
from graftwork.engine.core.client import EngineClient
from graftwork.platform.settings.settings import Settings

_ROUTERS = (
    # The routers that answer most requests come first: FastAPI tries one after another.
    chat.router,
    session_turns.router,
    sessions.router,
    health.router,
    health.metrics_router,
    models.router,
    messages.router,
    message_batch_routes.router,
    completions.router,
    embeddings.router,
    responses.router,
    conversations.router,
    tokenization.router,
    adapters.uploads_router,
    adapters.router,
    aliases.router,
    aliases.rollouts_router,
    upload_routes.router,
    part_routes.router,
    session_history.router,
    file_routes.uploads_router,
    file_routes.router,
    batch_routes.router,
    export_routes.router,
    retention_routes.router,
    usage.router,
    prices.router,
    overview.router,
    overview.admin_router,
    timelines.router,
    timelines.admin_router,
    timelines.switches_router,
    admin.tenants_router,
    admin.keys_router,
    organisations.router,
    quotas.router,
    webhooks.router,
    export_routes.admin_router,
    retention_routes.admin_router,
    admin.reports_router,
    admin_routes.router,
    token_routes.router,
    token_routes.identity_router,
    tenant_routes.keys_router,
    tenant_routes.members_router,
    console.pages_router,
    console.session_router,
    browser_routes.router,
    browser_routes.seat_router,
)


_ROUTES = tuple(route for router in _ROUTERS for route in router.routes if isinstance(route, APIRoute))


class GatewayApp(FastAPI):
    """The FastAPI application. To FastAPI's OpenAPI document it adds errors, streams, examples and more."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi(), _ROUTES)
        return self.openapi_schema


def create_app(
    settings: Settings, *, resources: Resources | None = None, engine: EngineClient | None = None
) -> FastAPI:
    """Creates the HTTP application.

    If `resources` is None, the application opens the services when it starts, and closes them when it ends. These
    services use `engine`, or by default the engine at the settings' address.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        if resources is not None:
            yield
            return
        async with open_resources(settings, engine=engine) as opened:
            _attach(app, opened)
            yield

    app = GatewayApp(
        title="Graftwork",
        version=graftwork.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    if resources is not None:
        _attach(app, resources)
    routes = (*app.routes, *_ROUTES)
    install_error_handlers(app, routes)
    refuse_methods_of_wider_paths(app, _ROUTES)
    app.state.paths = frozenset(getattr(route, "path", "") for route in routes)
    for router in _ROUTERS:
        app.include_router(router)
    app.add_middleware(CrashMiddleware)
    app.add_middleware(HeadMiddleware, routes=routes)
    allow_origins(app, settings.cors_origin)
    app.add_middleware(RequestIdMiddleware)
    return app


def create_metrics_app(resources: Resources) -> FastAPI:
    """Creates the application for the metrics port. It serves `/metrics` and `/healthz`, both without a key."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _attach(app, resources)
    app.add_api_route("/healthz", health.get_health)
    routes = (*app.routes, *health.open_metrics_router.routes)
    install_error_handlers(app, routes)
    app.include_router(health.open_metrics_router)
    app.add_middleware(CrashMiddleware)
    app.add_middleware(HeadMiddleware, routes=routes)
    app.add_middleware(RequestIdMiddleware)
    return app


def operation_id(route: APIRoute) -> str:
    """Returns the id of a route in the OpenAPI document.

    The id is the name of the route's function, so that generated clients have plain method names.
    """
    return route.name


def _attach(app: FastAPI, resources: Resources) -> None:
    app.state.resources, app.state.traces = resources, resources.server.traces
    app.state.readiness = Readiness(resources.server, resources.admin.modes)
