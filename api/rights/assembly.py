"""Puts together what the routes for exports need, and makes exports while the gateway serves.

`export_plan` is the one place that knows all sections of an export.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.export_sections import ADAPTER_SECTIONS, adapter_files
from graftwork.adapters.uploads.export_sections import UPLOADS
from graftwork.api.deps.background import repeating
from graftwork.api.deps.resources import BatchResources, RightsResources, SessionResources
from graftwork.platform.batches.file_vault import FileVault
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.exports.exporter import Content, ContentsOf, Exporter, Plan
from graftwork.platform.exports.exports import ExportKeeper
from graftwork.platform.exports.platform_sections import FILES, LEFT_OUT, PLATFORM_SECTIONS
from graftwork.platform.exports.sections import Row
from graftwork.platform.exports.worker import ExportWorker
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import TenantId
from graftwork.platform.retention.retention import RetentionKeeper
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.core.session import SessionKind
from graftwork.sessions.store.export_sections import SESSION_SECTIONS

EXPORTS_FOLDER = "exports"
"""The folder of exports in the data folder."""
_TICK_S = 5.0


def export_plan(files: FileVault, artifacts: ArtifactStore) -> Plan:
    """Returns what an export contains."""

    def content_of_file(row: Row) -> Iterator[Content]:
        if row["is_ready"]:
            yield Content(f"files/{row['id']}", lambda: files.open(_scope_of(row), row["id"]))

    return Plan(
        sections=(*PLATFORM_SECTIONS, *SESSION_SECTIONS, *ADAPTER_SECTIONS, UPLOADS),
        contents=(ContentsOf(FILES, content_of_file), adapter_files(artifacts)),
        left_out=LEFT_OUT,
    )


def rights_resources(
    settings: Settings,
    database: Database,
    clock: Clock,
    lease: GatewayLease,
    vault: FileVault,
    artifacts: ArtifactStore,
    sessions: SessionResources,
    batches: BatchResources,
) -> RightsResources:
    """Returns the services of the routes for exports and retention. The gateway of this lease makes exports in `vault`."""
    exports = ExportKeeper(database, vault, clock, settings.export_retention_s)
    exporter = Exporter(database, export_plan(batches.files.vault, artifacts))
    worker = ExportWorker(database, exporter, exports, lease, clock)
    retention = _retention_keeper(database, clock, sessions, batches)
    return RightsResources(exports, worker, retention, sessions.tasks)


def _retention_keeper(
    database: Database, clock: Clock, sessions: SessionResources, batches: BatchResources
) -> RetentionKeeper:
    """Returns what keeps the tenants' retention, and deletes what is older."""

    async def delete_sessions(scope: TenantScope, before: float) -> int:
        return await sessions.sessions.sweeper.delete_unchanged(scope, SessionKind.SESSION, before)

    return RetentionKeeper(
        database,
        clock,
        {
            "session_days": delete_sessions,
            "response_days": sessions.responses.delete_older,
            "file_days": batches.batches.delete_older,
            "usage_days": sessions.meter.delete_older,
        },
    )


def _scope_of(row: Row) -> TenantScope:
    return scope_of_tenant(AdminPrincipal(), TenantId(row["tenant_id"]))


@asynccontextmanager
async def making_exports(rights: RightsResources) -> AsyncGenerator[None]:
    """Makes exports until the end of the block: also those that another gateway has left."""
    async with repeating(rights.worker.tick, _TICK_S, "making exports"):
        yield
