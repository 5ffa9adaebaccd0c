"""The HTTP application: routes, error answers and the envelope, around one process's resources.

Importing it loads no torch and opens nothing.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

import graftwork
from graftwork.api.envelope import RequestEnvelope
from graftwork.api.errors import install_error_handlers
from graftwork.api.lifespan import open_resources
from graftwork.api.readiness import Readiness
from graftwork.api.resources import Resources
from graftwork.api.routes import (
    adapters,
    admin_keys,
    admin_quotas,
    admin_reports,
    admin_tenants,
    aliases,
    anthropic_messages,
    chat,
    completions,
    conversations,
    models,
    operations,
    responses,
    session_history,
    session_turns,
    sessions,
    tokenization,
    usage,
)
from graftwork.engine.client import EngineClient
from graftwork.platform.settings import Settings

_ROUTE_MODULES = (
    operations,
    models,
    chat,
    anthropic_messages,
    completions,
    responses,
    conversations,
    tokenization,
    adapters,
    aliases,
    sessions,
    session_turns,
    session_history,
    usage,
    admin_tenants,
    admin_keys,
    admin_quotas,
    admin_reports,
)


class GatewayApp(FastAPI):
    """FastAPI, whose description of itself also says how keys are sent: routes check them by their class."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                for operation in operations.values() if path.startswith("/v1/") else ():
                    operation["security"] = [{"key": []}]
        return super().openapi()


def create_app(
    settings: Settings, *, resources: Resources | None = None, engine: EngineClient | None = None
) -> FastAPI:
    """`resources` stay their giver's to close; without them the application opens its own when it starts.

    `engine` is then the engine that it talks to; by default the one at the settings' address.
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
    )
    if resources is not None:
        _attach(app, resources)
    install_error_handlers(app)
    for module in _ROUTE_MODULES:
        app.include_router(module.router)
    app.add_middleware(RequestEnvelope)
    return app


def _attach(app: FastAPI, resources: Resources) -> None:
    app.state.resources = resources
    app.state.readiness = Readiness(resources)
