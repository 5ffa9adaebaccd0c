"""Fetches adapters from their sources in the background, a few at a time on each gateway.

    tick, each second:   renew the leases of what runs ──► take the lease of what waits ──► a task for each
    task:                open each file ──► write it to the staging folder, within its limit ──► publish

Owns the leases: one gateway at a time is at a fetch. All state is in the database, so a fetch whose gateway has stopped is
begun anew by another, or by the same one after its restart; after `MAX_ATTEMPTS` it has failed, and says so.
Invariant: a fetch that this gateway has lost, or that a client has cancelled, changes nothing any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from graftwork.adapters.format.lora_config import MAX_CONFIG_BYTES
from graftwork.adapters.sources.remote_file import RemoteFile, SourceReader, refused
from graftwork.adapters.sources.source import AdapterSource, SourceKind
from graftwork.adapters.uploads import repository
from graftwork.adapters.uploads.pending_upload import PendingUpload, UploadLimits, UploadStatus
from graftwork.adapters.uploads.publishing import StagedPublisher
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import AdminPrincipal, scope_of_tenant

TICK_S = 1.0
"""Seconds between two calls of `tick`."""
MAX_ATTEMPTS = 3
_AT_ONCE = 2
"""Fetches that one gateway runs at the same time."""
_PAUSE_S = 10.0
"""Seconds before the second attempt; before the third it is twice as long."""

StartTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""A function that starts a background task with a name, and logs its failure."""


class FetchRunner:
    """Runs the fetches of all tenants, together with the runners of other gateways."""

    def __init__(
        self,
        database: Database,
        publisher: StagedPublisher,
        readers: Mapping[SourceKind, SourceReader],
        quota_of: Callable[[TenantId], Awaitable[Quota]],
        limits: UploadLimits,
        clock: Clock,
        *,
        gateway_id: str,
        lease_s: float,
        start: StartTask,
    ) -> None:
        """`quota_of` returns the limits of a tenant. A lease that is not renewed ends after `lease_s` seconds."""
        self._database = database
        self._staging = publisher.staging
        self._publisher = publisher
        self._readers = readers
        self._quota_of = quota_of
        self._limits = limits
        self._clock = clock
        self._gateway_id = gateway_id
        self._lease_s = lease_s
        self._start = start
        self._running: dict[str, tuple[PendingUpload, asyncio.Task[None]]] = {}

    @property
    def running(self) -> tuple[asyncio.Task[None], ...]:
        """The tasks of the fetches that run here."""
        return tuple(task for _, task in self._running.values())

    async def tick(self) -> None:
        """Renews the leases of this gateway's fetches, and begins others if there is room."""
        self._running = {key: (upload, task) for key, (upload, task) in self._running.items() if not task.done()}
        now = self._clock.now()
        for upload, task in self._running.values():
            async with self._database.write() as session:
                if not await repository.keep_lease(session, upload, self._gateway_id, now + self._lease_s):
                    task.cancel()  # a client has cancelled it, or another gateway has taken it over
        room = _AT_ONCE - len(self._running)
        if room <= 0:
            return
        async with self._database.read() as session:
            waiting = await repository.due(session, now, room)
        for upload in waiting:
            await self._begin(upload, now)

    async def close(self) -> None:
        """Stops the fetches of this gateway, and gives their leases back, so that they are begun anew at once."""
        for _, task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(self.running)
        for upload, _ in self._running.values():
            async with self._database.write() as session:
                await repository.put_off(session, upload, self._gateway_id, 0.0)
        self._running.clear()

    async def _begin(self, upload: PendingUpload, now: float) -> None:
        async with self._database.write() as session:
            if not await repository.take_lease(session, upload, self._gateway_id, now, self._lease_s):
                return
        upload = replace(upload, attempts=upload.attempts + 1)
        task = self._start(self._run(upload), f"fetching {upload.id}")
        self._running[upload.id] = (upload, task)

    async def _run(self, upload: PendingUpload) -> None:
        """Fetches and publishes one adapter, or stores why that is not possible."""
        scope, owner = scope_of_tenant(AdminPrincipal(), upload.tenant_id), self._gateway_id
        try:
            if upload.attempts > MAX_ATTEMPTS:
                raise Unavailable(
                    "The gateways that fetched these files have stopped before the end.", code="fetch_interrupted"
                )
            fetched = await self._fetched(upload)
            await self._publisher.publish(scope, fetched, await self._quota_of(upload.tenant_id), owner)
        except _Lost:
            return None  # the bytes may be those of another gateway now; a sweep removes what nobody writes
        except Unavailable as error:
            if upload.attempts >= MAX_ATTEMPTS:
                return await self._publisher.fail(scope, upload, error, owner)
            pause_s = _PAUSE_S * 2 ** (upload.attempts - 1)
            async with self._database.write() as session:
                await repository.put_off(session, upload, owner, self._clock.now() + pause_s)
        except GraftworkError as error:
            await self._publisher.fail(scope, upload, error, owner)

    async def _fetched(self, upload: PendingUpload) -> PendingUpload:
        """Writes the files of the source to the staging folder. Returns the upload, which is to be inspected now.

        Raises DeadlineExceeded if the source takes too long.
        """
        source = upload.source
        assert source is not None
        try:
            async with asyncio.timeout(self._limits.fetch_s):
                await asyncio.to_thread(self._staging.begin, upload)
                upload, source = await self._receive(upload, source)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{source.shown} did not send its files within {self._limits.fetch_s:g} s: upload them, or name a "
                "faster source.",
                code="fetch_timeout",
            ) from None
        origin = replace(upload.push.provenance, source=source.shown)
        upload = replace(upload, status=UploadStatus.INSPECTING, push=replace(upload.push, provenance=origin))
        await self._store(upload)
        return upload

    async def _receive(self, upload: PendingUpload, source: AdapterSource) -> tuple[PendingUpload, AdapterSource]:
        """Returns the upload with its length, and the source at the commit from which its files come."""
        reader = self._readers[source.kind]
        *config, weights = source.files
        for path in config:
            async with reader.open(source, path) as remote:
                await asyncio.to_thread(self._staging.put_config, upload, await _read_config(remote))
                source = remote.source
        async with reader.open(source, weights) as remote:
            if remote.size is not None:
                self._check_size(remote, remote.size)
                upload = replace(upload, size_bytes=remote.size)
                await self._store(upload)
            with self._staging.writing(upload) as file:
                async for chunk in remote.chunks:
                    self._check_size(remote, file.offset + len(chunk))
                    await file.write(chunk)
                await file.flush()
                return replace(upload, size_bytes=file.offset), remote.source

    def _check_size(self, remote: RemoteFile, size: int) -> None:
        if size > self._limits.max_bytes:
            message = (
                f"has weights of more than the {self._limits.max_bytes} bytes that this server takes (max_upload_bytes)"
            )
            raise refused(remote.source, message)

    async def _store(self, upload: PendingUpload) -> None:
        async with self._database.write() as session:
            if not await repository.change(session, upload, self._gateway_id):
                raise _Lost


class _Lost(Exception):
    """Raised if a client has cancelled a fetch, or if another gateway has taken it over."""


async def _read_config(remote: RemoteFile) -> bytes:
    content = bytearray()
    async for chunk in remote.chunks:
        content += chunk
        if len(content) > MAX_CONFIG_BYTES:
            raise refused(remote.source, f"has an adapter_config.json of more than {MAX_CONFIG_BYTES} bytes")
    return bytes(content)
