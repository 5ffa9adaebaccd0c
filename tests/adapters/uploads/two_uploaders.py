"""A registry that two tenants share, with uploads in parts, and fetches from a source in memory."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from graftwork.adapters.inspection.upload import Push
from graftwork.adapters.sources.remote_file import RemoteFile, refused
from graftwork.adapters.sources.source import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterSource,
    SourceKind,
    SourceRules,
    parse_source,
)
from graftwork.adapters.uploads.fetching import FetchRunner
from graftwork.adapters.uploads.pending_upload import PendingUpload, UploadLimits
from graftwork.adapters.uploads.publishing import StagedPublisher
from graftwork.adapters.uploads.staging import StagingFolder
from graftwork.adapters.uploads.uploads import NewFetch, NewUpload, UploadKeeper
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import TenantScope
from tests.adapters.adapter_files import DESCRIPTION, config_bytes
from tests.adapters.registry.two_tenants import FILES, NO_LIMITS, TwoTenants

LIMITS = UploadLimits(
    max_bytes=1_000_000, max_open=3, max_staged_bytes=5_000_000, lives_s=1000.0, fetch_s=30.0, idle_s=5.0
)
LEASE_S = 30.0
COMMIT = "c" * 40


class MemorySource:
    """Reads sources that a test has put here."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {CONFIG_FILE: config_bytes(), WEIGHTS_FILE: FILES[0]}
        self.opened: list[str] = []
        self.failure: Exception | None = None
        """What opening a file raises."""
        self.says_size = True
        self.gate: asyncio.Event | None = None
        """What the second half of a file waits for."""
        self.half_sent = asyncio.Event()
        """Is set when the first half of a file has been read."""

    @asynccontextmanager
    async def open(self, source: AdapterSource, path: str) -> AsyncGenerator[RemoteFile]:
        self.opened.append(f"{source.shown}/{path}")
        if self.failure is not None:
            raise self.failure
        content = self.files.get(path.rpartition("/")[2])
        if content is None:
            raise refused(source, f"has no {path}")
        size = len(content) if self.says_size else None
        yield RemoteFile(size, replace(source, revision=COMMIT), self._chunks(content))

    async def _chunks(self, content: bytes) -> AsyncIterator[bytes]:
        half = len(content) // 2
        yield content[:half]
        self.half_sent.set()
        if self.gate is not None:
            await self.gate.wait()
        yield content[half:]


class TwoUploaders:
    """The registry's two tenants, whose uploads go through a staging folder."""

    def __init__(self, tenants: TwoTenants, limits: UploadLimits = LIMITS) -> None:
        self.tenants = tenants
        self.a, self.b, self.clock = tenants.a, tenants.b, tenants.clock
        self.staging = StagingFolder(tenants.root / "uploads")
        self.publisher = StagedPublisher(tenants.database, self.staging, tenants.registry, DESCRIPTION, tenants.clock)
        rules = SourceRules(("hf:", "https:"))
        self.keeper = UploadKeeper(tenants.database, self.publisher, tenants.clock, limits, rules)
        self.source = MemorySource()
        self.limits = limits

    def runner(self, gateway_id: str = "g1") -> FetchRunner:
        async def quota_of(tenant_id: TenantId) -> Quota:
            return NO_LIMITS

        return FetchRunner(
            self.tenants.database,
            self.publisher,
            dict.fromkeys(SourceKind, self.source),
            quota_of,
            self.limits,
            self.clock,
            gateway_id=gateway_id,
            lease_s=LEASE_S,
            start=lambda work, name: asyncio.create_task(work, name=name),
        )

    async def create(
        self,
        name: str = "bot",
        seed: int = 0,
        scope: TenantScope | None = None,
        quota: Quota = NO_LIMITS,
        **changes: Any,
    ) -> PendingUpload:
        config, weights = config_bytes(), FILES[seed]
        new = NewUpload(name, config, len(weights), digest(config, weights), Push(actor="key_1"))
        return await self.keeper.create(scope or self.a, replace(new, **changes), quota)

    async def append(self, upload: PendingUpload, offset: int, *pieces: bytes) -> int:
        return await self.keeper.append(self.a, upload.id, offset, chunks(*pieces))

    async def complete(self, upload: PendingUpload, quota: Quota = NO_LIMITS) -> PendingUpload:
        return await self.keeper.complete(self.a, upload.id, quota)

    async def fetch(self, name: str = "bot", text: str = "hf:acme/lora@v1", digest: str | None = None) -> PendingUpload:
        new = NewFetch(name, parse_source(text), digest, Push(actor="key_1"))
        return await self.keeper.fetch(self.a, new, NO_LIMITS)

    async def get(self, upload: PendingUpload) -> PendingUpload:
        return await self.keeper.get(self.a, upload.id)

    def staged(self) -> set[str]:
        """The uploads that have bytes on the disk."""
        return {path.parent.name for path in (self.tenants.root / "uploads").glob("*/*/weights")}


async def settled(runner: FetchRunner) -> None:
    """Lets a runner begin what waits, and returns when that has ended."""
    await runner.tick()
    await asyncio.gather(*runner.running, return_exceptions=True)


def digest(*files: bytes) -> str:
    return f"sha256:{hashlib.sha256(b''.join(files)).hexdigest()}"


async def chunks(*pieces: bytes, then: Callable[[], Exception] | None = None) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    if then is not None:
        raise then()
