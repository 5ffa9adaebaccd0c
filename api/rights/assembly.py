"""Puts together what the routes for exports need, and makes exports while the gateway serves.

`export_plan` is the one place that knows all sections of an export.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.export_sections import ADAPTER_SECTIONS, adapter_files
from graftwork.api.deps.resources import RightsResources, ServerTasks, repeating
from graftwork.platform.batches.file_folder import FileFolder
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.exports.exporter import Content, ContentsOf, Exporter, Plan
from graftwork.platform.exports.exports import ExportKeeper
from graftwork.platform.exports.platform_sections import FILES, LEFT_OUT, PLATFORM_SECTIONS
from graftwork.platform.exports.sections import Row
from graftwork.platform.exports.worker import ExportWorker
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.settings.settings import Settings
from graftwork.sessions.store.export_sections import SESSION_SECTIONS

EXPORTS_FOLDER = "exports"
"""The folder of exports in the data folder."""
_TICK_S = 5.0


def export_plan(files: FileFolder, artifacts: ArtifactStore) -> Plan:
    """Returns what an export contains."""

    def content_of_file(row: Row) -> Iterator[Content]:
        if row["is_ready"]:
            yield Content(f"files/{row['id']}", lambda: files.open(row["tenant_id"], row["id"]))

    return Plan(
        sections=(*PLATFORM_SECTIONS, *SESSION_SECTIONS, *ADAPTER_SECTIONS),
        contents=(ContentsOf(FILES, content_of_file), adapter_files(artifacts)),
        left_out=LEFT_OUT,
    )


def rights_resources(
    settings: Settings, database: Database, clock: Clock, lease: GatewayLease, tasks: ServerTasks, plan: Plan
) -> RightsResources:
    """Returns the services of the routes for exports."""
    exports = ExportKeeper(database, FileFolder(settings.data_dir / EXPORTS_FOLDER), clock)
    worker = ExportWorker(database, Exporter(database, plan), exports, lease, clock, settings.export_retention_s)
    return RightsResources(exports, worker, tasks)


@asynccontextmanager
async def making_exports(rights: RightsResources) -> AsyncGenerator[None]:
    """Makes exports until the end of the block: also those that another gateway has left."""
    async with repeating(rights.worker.tick, _TICK_S, "making exports"):
        yield
