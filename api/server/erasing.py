"""Says what is erased of a deleted tenant, besides the rows of `platform/tenancy`: its sessions, adapters, files,
batches, cached KV, timelines, the checks of its schemas, the names in its usage records, and its webhook with its alerts.
"""

from graftwork.api.deps.resources import InferenceResources
from graftwork.api.server.foundation import Foundation
from graftwork.platform.alerts.webhooks import Webhooks
from graftwork.platform.batches.batches import BatchKeeper
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.principals import TenantScope, isolation_of
from graftwork.sessions.service import SessionService


def tenant_erasure(
    base: Foundation, inference: InferenceResources, sessions: SessionService, batches: BatchKeeper
) -> TenantErasure:
    async def forget(scope: TenantScope) -> bool:
        await base.engine.forget_domain(isolation_of(scope, inference.pepper))
        return True

    async def forget_checks(scope: TenantScope) -> bool:
        inference.planner.forget(scope)
        return True

    return TenantErasure(
        base.database,
        inference.clock,
        {
            "sessions": sessions.eraser.erase,
            "adapters": inference.registry.erase,
            "batches and files": batches.erase,
            "kv": forget,
            "checks of schemas": forget_checks,
            "timelines": base.tracing.forget,
            "names in usage records": UsageMeter(base.database).erase,
            "webhooks": Webhooks(base.database, base.clock, inference.pepper).erase,
        },
    )
