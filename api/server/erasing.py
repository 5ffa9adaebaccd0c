"""Removes what is over, now and then, and what deleted tenants have left, also on engines that were away then.

    sweep ──► TenantErasure: all engines of the fleet
        └───► engines that have come since the last sweep ──► forget the KV of all tenants that were deleted lately

`tenant_erasure` says what is erased besides the rows of `platform/tenancy`, and `open_sweeps` what else is swept.
An engine that scaling has ended, or whose machine was off, keeps its KV files. The deleted tenants in the database say
what it must forget when it comes back.
Owns nothing but the mark of each engine that was told. Never waits for an engine before it gets requests: nobody can ask
for the KV of a deleted tenant.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from graftwork.adapters.uploads.uploads import UploadKeeper
from graftwork.api.deps.background import repeating
from graftwork.api.deps.resources import InferenceResources, Resources, RightsResources
from graftwork.api.server.foundation import Foundation
from graftwork.engine.core.client import EngineClient
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.members import Member
from graftwork.platform.alerts.webhooks import Webhooks
from graftwork.platform.batches.batches import BatchKeeper
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.people.people import People
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.principals import TenantScope, isolation_of
from graftwork.sessions.service import SessionService
from graftwork.sessions.store.event_pruning import EventPruner

_log = logging.getLogger(__name__)

TOLD_FOR_S = 90 * 86400.0
"""For so many seconds after a tenant's deletion, engines that come back are told of it."""
SWEEP_S = 300.0
"""Seconds between two sweeps of one kind."""
_ERASE_S = 5.0


def tenant_erasure(
    base: Foundation,
    inference: InferenceResources,
    sessions: SessionService,
    batches: BatchKeeper,
    rights: RightsResources,
    uploads: UploadKeeper,
    people: People,
) -> TenantErasure:
    async def forget(scope: TenantScope) -> bool:
        await base.engine.forget_domain(isolation_of(scope, inference.pepper))
        return True

    async def destroy_key(scope: TenantScope) -> bool:
        """Waits for the sessions: a turn that still ends reads its own rows."""
        return await sessions.eraser.is_done(scope) and await base.keys.destroy(scope)

    async def forget_checks(scope: TenantScope) -> bool:
        inference.planner.forget(scope)
        return True

    return TenantErasure(
        base.database,
        inference.clock,
        {
            "sessions": sessions.eraser.erase,
            "uploads of adapters": uploads.erase,
            "adapters": inference.registry.erase,
            "batches and files": batches.erase,
            "exports": rights.exports.erase,
            "retention": rights.retention.erase,
            "data keys": destroy_key,
            "kv": forget,
            "checks of schemas": forget_checks,
            "timelines": base.tracing.forget,
            "names in usage records": UsageMeter(base.database).erase,
            "roles of people": people.erase,
            "webhooks": Webhooks(base.database, base.clock, inference.pepper).erase,
        },
    )


class LateErasure:
    """Sweeps on behalf of one gateway."""

    def __init__(self, erasure: TenantErasure, engine: EngineClient, pepper: bytes) -> None:
        self._erasure = erasure
        self._engine = engine
        self._pepper = pepper

    async def sweep(self) -> None:
        """Erases as much as it can of all deleted tenants, and tells engines that have come back. Call it repeatedly."""
        await self._erasure.sweep()
        if not isinstance(self._engine, FleetClient):
            return  # the erasure waits until the only engine answers
        members = self._engine.membership.members.values()
        new = [one for one in members if one.description is not None and not one.knows_deletions]
        if not new:
            return
        deleted = await self._erasure.deleted_within(TOLD_FOR_S)
        for member in new:
            await self._tell(member, deleted)

    async def _tell(self, member: Member, deleted: list[TenantId]) -> None:
        member.knows_deletions = True  # first: an engine that is lost meanwhile must be told again
        try:
            for tenant_id in deleted:
                await member.client.forget_domain(isolation_of(tenant_id, self._pepper))
        except Unavailable as error:
            member.knows_deletions = False
            extra = {"replica": member.replica_id, "reason": error.message}
            _log.warning("replica_not_told_of_deletions", extra=extra)


async def open_sweeps(stack: AsyncExitStack, base: Foundation, resources: Resources) -> None:
    """Ends and removes what is over: once now, then now and then until `stack` is closed."""
    erase = LateErasure(resources.admin.erasure, base.engine, resources.admin.pepper).sweep
    await stack.enter_async_context(repeating(erase, _ERASE_S, "the sweep of deleted tenants"))
    sweeps: dict[str, Callable[[], Awaitable[object]]] = {
        "uploads": resources.account.pending_uploads.sweep,
        "deleted adapters": resources.account.registry.deletions.sweep,
        "sessions": resources.sessions.sessions.sweep,
        "responses": resources.sessions.responses.sweep,
        "old events": EventPruner(base.database, base.clock, resources.server.settings.event_retention_s).prune,
        "idempotency keys": resources.server.idempotency.sweep,
        "used sign-ins": resources.people.sign_ins.sweep,
        "batches": resources.batches.batches.sweep,
        "files": resources.batches.files.sweep,
        "exports": resources.rights.exports.sweep,
        "old data": resources.rights.retention.sweep,
        "usage journals": resources.inference.accounting.backlog.recover,
        "old months": lambda: resources.account.meter.drop_old_months(base.clock.now()),
        **base.ledger.sweeps(),
    }
    for name, sweep in sweeps.items():
        await sweep()
        await stack.enter_async_context(repeating(sweep, SWEEP_S, f"the sweep of {name}"))
