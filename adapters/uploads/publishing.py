"""Makes a version of an upload whose bytes are complete: digest, inspection, version; then its bytes go.

Owns the end of every upload, also of one that fails. Never decides whether an upload may be tried again.
Invariant: the version is recorded before the upload is ready. If a crash comes between, the same upload finds the version
that it has made.
"""

import asyncio
from dataclasses import replace

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.adapters.registry.repository import AdapterWriter
from graftwork.adapters.uploads import repository
from graftwork.adapters.uploads.pending_upload import PendingUpload, UploadStatus
from graftwork.adapters.uploads.staging import StagingFolder, digest_of
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import GraftworkError, ValidationFailed
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import TenantScope


class StagedPublisher:
    """Publishes the uploads of one gateway, for clients that complete them and for fetches."""

    def __init__(
        self,
        database: Database,
        staging: StagingFolder,
        registry: AdapterRegistry,
        description: EngineDescription,
        clock: Clock,
    ) -> None:
        self._database = database
        self.staging = staging
        self._clock = clock
        self.registry = registry
        self.description = description

    async def publish(
        self, scope: TenantScope, upload: PendingUpload, quota: Quota, owner: str | None = None
    ) -> PendingUpload:
        """Publishes the staged files, and removes them. Returns the ready upload. `owner` is the gateway that fetched.

        Raises ValidationFailed for a wrong digest, and the errors of `AdapterRegistry.publish`; then the bytes stay.
        """
        config = await asyncio.to_thread(self.staging.config, upload)
        with self.staging.reading(upload) as weights:
            if upload.digest is not None:
                found = await asyncio.to_thread(digest_of, config, weights)
                if found != upload.digest:
                    message = f"digest: the files have the digest {found}, and not {upload.digest}: they were damaged or changed."
                    raise ValidationFailed(message, param="digest", code="digest_mismatch")
            files = AdapterFiles(config, weights)
            published = await self.registry.publish(scope, upload.name, files, self.description, quota, upload.push)
        ended = replace(upload, status=UploadStatus.READY, version=published.version.version)
        async with self._database.write() as session:
            is_own = await repository.finish(session, ended, owner)
        if is_own:
            await asyncio.to_thread(self.staging.remove, upload.tenant_id, upload.id)
        return ended

    async def fail(
        self, scope: TenantScope, upload: PendingUpload, error: GraftworkError, owner: str | None = None
    ) -> None:
        """Stores why an upload has failed, and removes its bytes."""
        said = {"code": error.code, "message": error.message, "param": error.param}
        async with self._database.write() as session:
            ended = replace(upload, status=UploadStatus.FAILED, error=said)
            is_own = await repository.finish(session, ended, owner)
            if is_own and upload.source is not None:
                details = {"source": upload.source.shown, "code": error.code}
                await AdapterWriter(session, scope).audit(
                    self._clock.now(), upload.push.actor, "adapter.fetch.refused", upload.name, details
                )
        if is_own:  # else a client has cancelled it, or another gateway writes there
            await asyncio.to_thread(self.staging.remove, upload.tenant_id, upload.id)
