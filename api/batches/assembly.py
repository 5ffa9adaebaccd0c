"""Puts together what files and batches need, and runs batches while the gateway serves."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from graftwork.api.batches.endpoints import answer_request
from graftwork.api.batches.line_forms import missing_line
from graftwork.api.batches.response_lines import ResponseLines
from graftwork.api.batches.runner import TICK_S, BatchRunner, RunnerLimits, RunnerServices
from graftwork.api.deps.background import repeating
from graftwork.api.deps.resources import BatchResources, Resources
from graftwork.platform.batches.batches import BatchKeeper, BatchLimits
from graftwork.platform.batches.claims import BatchClaims
from graftwork.platform.batches.file_vault import FileVault
from graftwork.platform.batches.files import FileKeeper, FileLimits
from graftwork.platform.batches.output import OutputWriter
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.key_standing import KeyStanding

FILES_FOLDER = "files"
"""The folder of tenants' files in the data folder."""


def batch_resources(settings: Settings, database: Database, clock: Clock, vault: FileVault) -> BatchResources:
    """Returns the services of the routes for files and batches."""
    limits = FileLimits(settings.tenant_file_bytes, settings.file_retention_s)
    files = FileKeeper(database, vault, clock, limits)
    bounds = BatchLimits(settings.max_batch_requests, settings.max_open_batches)
    return BatchResources(files, BatchKeeper(database, files, clock, bounds), settings.max_batch_file_bytes)


def batch_runner(resources: Resources, lease: GatewayLease, limits: RunnerLimits) -> BatchRunner:
    """Returns what runs batches on the gateway of this lease."""
    server, inference, files = resources.server, resources.inference, resources.batches.files

    claims = BatchClaims(server.database, files, lease, server.clock)
    services = RunnerServices(
        claims=claims,
        files=files,
        output=OutputWriter(claims, files, missing_line, server.json.parse),
        standing=KeyStanding(server.database, server.clock),
        answer=partial(answer_request, inference, ResponseLines(resources.sessions, server.idempotency)),
        quota_of=resources.account.tenancy.limits.of_tenant,
        parse=server.json.parse,
        clock=server.clock,
        telemetry=server.telemetry,
    )
    return BatchRunner(services, limits)


@asynccontextmanager
async def running_batches(resources: Resources, lease: GatewayLease) -> AsyncGenerator[None]:
    """Runs batches until the end of the block, unless the settings leave them to other gateways. Then others go on."""
    settings = resources.server.settings
    limits = RunnerLimits(settings.batch_concurrency, settings.tenant_batch_concurrency, settings.max_batch_requests)
    if not limits.lines:
        yield
        return
    runner = batch_runner(resources, lease, limits)
    try:
        async with repeating(runner.tick, TICK_S, "running batches"):
            yield
    finally:
        await runner.close()
