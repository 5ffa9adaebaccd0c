"""Puts together what uploads in parts and fetches need, and fetches adapters while the gateway serves."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.adapters.sources.bucket_reader import BucketReader
from graftwork.adapters.sources.remote_file import SourceReader
from graftwork.adapters.sources.source import SourceKind, SourceRules
from graftwork.adapters.sources.web_reader import WebReader
from graftwork.adapters.uploads.fetching import TICK_S, FetchRunner
from graftwork.adapters.uploads.pending_upload import UploadLimits
from graftwork.adapters.uploads.publishing import StagedPublisher
from graftwork.adapters.uploads.staging import StagingFolder
from graftwork.adapters.uploads.uploads import UploadKeeper
from graftwork.api.deps.background import repeating
from graftwork.api.deps.resources import Resources
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.settings.settings import Settings

UPLOADS_FOLDER = "uploads"
"""The folder of unfinished uploads in the data folder."""


def upload_keeper(
    settings: Settings, database: Database, clock: Clock, registry: AdapterRegistry, description: EngineDescription
) -> UploadKeeper:
    """Returns the service of the routes for uploads in parts and fetches."""
    staging = StagingFolder(settings.data_dir / UPLOADS_FOLDER)
    publisher = StagedPublisher(database, staging, registry, description, clock)
    limits = UploadLimits(
        max_bytes=settings.max_upload_bytes,
        max_open=settings.max_open_uploads,
        max_staged_bytes=settings.staged_upload_bytes,
        lives_s=settings.upload_expires_s,
        fetch_s=settings.upload_timeout_s,
    )
    return UploadKeeper(database, publisher, clock, limits, SourceRules(settings.adapter_sources))


def source_readers(settings: Settings, hub: str) -> dict[SourceKind, SourceReader]:
    """Returns what reads each kind of source. `hub` is the address of the Hugging Face Hub."""
    rules = SourceRules(settings.adapter_sources)
    token = settings.adapter_hub_token
    web = WebReader(settings.adapter_source_networks, rules=rules, hub=hub, hub_token=token)
    return {SourceKind.HUB: web, SourceKind.WEB: web, SourceKind.BUCKET: BucketReader()}


@asynccontextmanager
async def running_fetches(resources: Resources, lease: GatewayLease, hub: str) -> AsyncGenerator[None]:
    """Fetches adapters until the end of the block; then other gateways go on. `hub` is the address of the Hub."""
    server, account = resources.server, resources.account
    uploads = account.pending_uploads
    runner = FetchRunner(
        server.database,
        uploads.publisher,
        source_readers(server.settings, hub),
        account.tenancy.limits.of_tenant,
        uploads.limits,
        server.clock,
        gateway_id=lease.gateway_id,
        lease_s=server.settings.lease_s,
        start=resources.inference.tasks.start,
    )
    try:
        async with repeating(runner.tick, TICK_S, "fetching adapters"):
            yield
    finally:
        await runner.close()
