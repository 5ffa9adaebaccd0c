"""Says what is erased of a deleted tenant, besides the rows of `platform/tenancy`: its sessions, adapters, cached KV, and
the checks of its schemas.
"""

from graftwork.api.deps.resources import InferenceResources
from graftwork.engine.core.client import EngineClient
from graftwork.platform.database import Database
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.principals import TenantScope, isolation_of
from graftwork.sessions.service import SessionService


def tenant_erasure(
    inference: InferenceResources, database: Database, engine: EngineClient, sessions: SessionService
) -> TenantErasure:
    async def forget(scope: TenantScope) -> bool:
        await engine.forget_domain(isolation_of(scope, inference.pepper))
        return True

    async def forget_checks(scope: TenantScope) -> bool:
        inference.planner.forget(scope)
        return True

    return TenantErasure(
        database,
        inference.clock,
        {
            "sessions": sessions.eraser.erase,
            "adapters": inference.registry.erase,
            "kv": forget,
            "checks of schemas": forget_checks,
        },
    )
