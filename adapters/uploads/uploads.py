"""Receives the files of adapters in parts, and lets the server fetch them from sources.

    create ──► append, at the offset ──► … ──► complete: digest, inspection, a version        (the client sends)
    fetch ──► a gateway fetches (fetching.py) ──► inspection, a version                       (the server fetches)

Owns the limits of open uploads, and what a client may do with them. Never fetches anything, and never inspects a file: the
registry does.
Invariant: the bytes of an upload are in the staging folder exactly as long as its row says that it is open; a crash between
two steps leaves at most a row, or bytes with a row, which `sweep` removes when they expire.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from graftwork.adapters.format.specs import check_adapter_name
from graftwork.adapters.inspection.upload import Push, check_bytes
from graftwork.adapters.registry.organisation_rows import hold_organisation
from graftwork.adapters.registry.repository import AdapterWriter
from graftwork.adapters.sources.source import AdapterSource, SourceKind, SourceRules
from graftwork.adapters.uploads import repository
from graftwork.adapters.uploads.pending_upload import (
    UPLOAD_PREFIX,
    PendingUpload,
    UploadLimits,
    UploadStatus,
    unknown_upload,
)
from graftwork.adapters.uploads.publishing import StagedPublisher
from graftwork.adapters.uploads.staging import StagedFile
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    NotPermitted,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
    ValidationFailed,
)
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.quotas.limits import Level
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant

_SWEPT_PER_QUERY = 100
_RETRY_AFTER_S = 5.0
_ABANDONED_AFTER_S = 600.0
"""Seconds for which bytes without an open upload are kept: a fetch may be just about to begin or to end."""


@dataclass(frozen=True, slots=True)
class NewUpload:
    """What a client says before it sends the weights in parts."""

    name: str
    config: bytes | None
    """The content of adapter_config.json; None for a GGUF file."""
    size_bytes: int
    digest: str
    """`sha256:…` of the configuration and the weights, one after the other."""
    push: Push


@dataclass(frozen=True, slots=True)
class NewFetch:
    """What a client says of an adapter that the server shall fetch."""

    name: str
    source: AdapterSource
    digest: str | None
    """`sha256:…` of the files, one after the other; None does not check them."""
    push: Push


class UploadKeeper:
    """The uploads in parts and the fetches of all tenants. Each call except `sweep` is about those of one tenant."""

    def __init__(
        self,
        database: Database,
        publisher: StagedPublisher,
        clock: Clock,
        limits: UploadLimits,
        rules: SourceRules,
    ) -> None:
        self._database = database
        self._staging = publisher.staging
        self.publisher = publisher
        self._clock = clock
        self._rules = rules
        self.limits = limits

    async def create(self, scope: TenantScope, new: NewUpload, quota: Quota) -> PendingUpload:
        """Begins an upload whose weights the client sends in parts.

        Raises ValidationFailed for a wrong name, PayloadTooLarge for weights above the limit, BudgetSpent above the
        tenant's limits, CapacityContended if it has too many open uploads, and Unavailable if all tenants have.
        """
        if new.size_bytes > self.limits.max_bytes:
            raise self._too_large(new.size_bytes)
        upload = await self._begun(scope, new.name, new.push, UploadStatus.RECEIVING, new.size_bytes)
        upload = replace(upload, digest=new.digest)
        async with self._database.write() as session:
            await self._admit(session, scope, upload, quota)
            await asyncio.to_thread(self._staging.begin, upload, new.config)
            await repository.add(session, upload)
        return upload

    async def fetch(self, scope: TenantScope, new: NewFetch, quota: Quota) -> PendingUpload:
        """Begins a fetch. A gateway fetches the files soon, in the background.

        Raises the errors of `create`, and NotPermitted for a source that the operator does not allow.
        """
        self._rules.check(new.source, scope)
        if new.source.kind is SourceKind.WEB and new.digest is None:
            message = (
                "digest: a web server may change its files, so say which you mean: sha256:… of adapter_config.json and "
                "adapter_model.safetensors, one after the other, or of the GGUF file."
            )
            raise ValidationFailed(message, param="digest", code="digest_required")
        upload = await self._begun(scope, new.name, new.push, UploadStatus.FETCHING, self.limits.max_bytes)
        upload = replace(upload, digest=new.digest, source=new.source)
        async with self._database.write() as session:
            await self._admit(session, scope, upload, quota)
            await repository.add(session, upload)
            details = {"source": new.source.shown, "upload": upload.id}
            await AdapterWriter(session, scope).audit(
                upload.created_at, new.push.actor, "adapter.fetch.requested", new.name, details
            )
        return upload

    async def get(self, scope: TenantScope, upload_id: str) -> PendingUpload:
        """Returns an upload. Raises NotFound if the tenant has none such, or if it has expired."""
        async with self._database.read() as session:
            upload = await repository.find(session, scope, upload_id)
        if upload is None or upload.expires_at <= self._clock.now():
            raise unknown_upload()
        return upload

    async def list(self, scope: TenantScope, name: str | None, request: PageRequest) -> Page[PendingUpload]:
        """Returns one page of the uploads of an adapter, or of all for None, also of those that have ended but not expired.

        Raises NotFound if `request.after` is not the id of an upload of the tenant.
        """
        async with self._database.read() as session:
            found = await repository.page(session, scope, name, self._clock.now(), request)
        if found is None:
            raise unknown_upload()
        return found

    async def received(self, upload: PendingUpload) -> int | None:
        """Returns how many bytes of the weights have arrived; None if another gateway has them."""
        if not upload.is_open:
            return None if upload.status is UploadStatus.FAILED else upload.size_bytes
        return await asyncio.to_thread(self._staging.offset, upload)

    async def append(self, scope: TenantScope, upload_id: str, offset: int, chunks: AsyncIterator[bytes]) -> int:
        """Adds bytes to the weights, and returns the offset behind them. What has arrived before an error stays.

        Raises Conflict if the upload has not as many bytes as `offset` (the detail `offset` says how many), takes no bytes
        any more, or is just written by another request. Raises PayloadTooLarge for bytes above the announced length, and
        RequestTimeout if the client is silent for too long.
        """
        upload = await self.get(scope, upload_id)
        _require_receiving(upload)
        with self._staging.writing(upload) as file:
            if offset != file.offset:
                raise Conflict(
                    f"This upload has {file.offset} bytes: send those from offset {file.offset} on.",
                    param="upload-offset",
                    code="wrong_offset",
                    details={"offset": file.offset},
                )
            await self._receive(upload, file, chunks)
            await file.flush()
            return file.offset

    async def complete(self, scope: TenantScope, upload_id: str, quota: Quota) -> PendingUpload:
        """Checks the digest, and publishes the files as a version. Returns the upload with its version.

        Raises Conflict if bytes are missing, or if another push has made a version of this name since the upload began,
        ValidationFailed for a wrong digest and whatever the inspection refuses, and the other errors of the registry. After
        a ValidationFailed and such a conflict the upload has failed; after other errors it can be completed again.
        """
        upload = await self.get(scope, upload_id)
        if upload.status is UploadStatus.READY:
            return upload
        _require_receiving(upload)
        with self._staging.writing(upload) as file:
            if file.offset != upload.size_bytes:
                raise Conflict(
                    f"The upload has {file.offset} of its {upload.size_bytes} bytes: send the rest, then complete it.",
                    code="upload_incomplete",
                    details={"offset": file.offset},
                )
            try:
                ended = await self.publisher.publish(scope, upload, quota)
            except (ValidationFailed, Conflict) as error:
                await self.publisher.fail(scope, upload, error)
                raise
        return ended

    async def cancel(self, scope: TenantScope, upload_id: str) -> PendingUpload:
        """Removes an upload and its bytes. A version that it has become stays. Raises NotFound as `get` does."""
        upload = await self.get(scope, upload_id)
        await self._remove(scope, upload_id)
        return upload

    async def sweep(self) -> int:
        """Removes the uploads of all tenants that have expired, and bytes without an open upload, such as those of a
        fetch that another gateway has ended. Returns how many had expired.
        """
        num_removed = 0
        while True:
            async with self._database.read() as session:
                lapsed = await repository.lapsed(session, self._clock.now(), _SWEPT_PER_QUERY)
            for tenant_id, upload_id in lapsed:
                await self._remove(_scope(tenant_id), upload_id)
            num_removed += len(lapsed)
            if len(lapsed) < _SWEPT_PER_QUERY:
                break
        for tenant_id, upload_id in await asyncio.to_thread(
            self._staging.abandoned, self._clock.now() - _ABANDONED_AFTER_S
        ):
            async with self._database.read() as session:
                found = await repository.find(session, _scope(tenant_id), upload_id)
            if found is None or not found.is_open:
                await asyncio.to_thread(self._staging.remove, tenant_id, upload_id)
        return num_removed

    async def erase(self, scope: TenantScope) -> bool:
        """Removes all uploads of a deleted tenant. Returns True."""
        async with self._database.write() as session:
            await repository.forget_all(session, scope)
        await asyncio.to_thread(self._staging.remove_tenant, TenantId(scope))
        return True

    async def _begun(
        self, scope: TenantScope, name: str, push: Push, status: UploadStatus, size_bytes: int
    ) -> PendingUpload:
        check_adapter_name(name, self.publisher.description.model_name)
        now, registry = self._clock.now(), self.publisher.registry
        push = replace(push, expects=await registry.next_version(scope, name))
        return PendingUpload(
            id=new_id(UPLOAD_PREFIX),
            tenant_id=TenantId(scope),
            name=name,
            status=status,
            size_bytes=size_bytes,
            digest=None,
            created_at=now,
            expires_at=now + self.limits.lives_s,
            push=push,
        )

    async def _admit(self, session: WriteSession, scope: TenantScope, upload: PendingUpload, quota: Quota) -> None:
        """Checks the limits while the tenant's row is locked, so that no two uploads pass them together."""
        writer = AdapterWriter(session, scope)
        if not await writer.lock_tenant():
            raise NotPermitted("This tenant was deleted: it takes no more adapters.", code="tenant_deleted")
        num_open, sent_bytes = await repository.count_open(session, scope)
        if num_open >= self.limits.max_open:
            raise CapacityContended(
                f"{num_open} of your uploads have not ended, and at most {self.limits.max_open} may be open: complete or "
                "cancel one, or wait until one expires.",
                code="too_many_uploads",
                retry_after_s=_RETRY_AFTER_S,
            )
        announced = upload.size_bytes if upload.source is None else 0
        check_bytes((await writer.usage()).stored_bytes + sent_bytes, announced, quota)
        if (held := await hold_organisation(session, scope)) is not None:
            check_bytes(held.usage.stored_bytes, announced, held.quota, Level.ORGANISATION)
        if await repository.sum_open_bytes(session) + upload.size_bytes > self.limits.max_staged_bytes:
            raise Unavailable(
                "The uploads that are under way take all the room that this server has for them: try again later.",
                code="too_many_uploads",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def _receive(self, upload: PendingUpload, file: StagedFile, chunks: AsyncIterator[bytes]) -> None:
        idle_s = self.limits.idle_s
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    chunk = await anext(chunks)
                if file.offset + len(chunk) > upload.size_bytes:
                    raise PayloadTooLarge(
                        f"This part goes beyond the {upload.size_bytes} bytes that the upload was to have: create an upload "
                        "of the right length."
                    )
                await file.write(chunk)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RequestTimeout(
                f"No byte of this part came for {idle_s:g} s: go on at offset {file.offset}, with smaller parts or over a "
                "faster connection.",
                details={"offset": file.offset},
            ) from None

    async def _remove(self, scope: TenantScope, upload_id: str) -> None:
        async with self._database.write() as session:
            await repository.forget(session, scope, upload_id)
        await asyncio.to_thread(self._staging.remove, TenantId(scope), upload_id)

    def _too_large(self, size_bytes: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"The weights have {size_bytes} bytes, and this server takes {self.limits.max_bytes} (max_upload_bytes).",
            param="size_bytes",
        )


def _require_receiving(upload: PendingUpload) -> None:
    if upload.status is not UploadStatus.RECEIVING:
        message = f"This upload is {upload.status}: it takes nothing more from a client."
        raise Conflict(message, code="upload_not_receiving", details={"status": upload.status})


def _scope(tenant_id: TenantId) -> TenantScope:
    return scope_of_tenant(AdminPrincipal(), tenant_id)
