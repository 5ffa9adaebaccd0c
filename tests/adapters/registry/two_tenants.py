"""A registry over a real database and a real folder, which two tenants share."""

from pathlib import Path
from typing import Any

from graftwork.adapters.format.specs import Adapter, Caller
from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.adapters.inspection.upload import PLAIN_PUSH, Push
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import (
    GraftworkError,
    NotFound,
)
from graftwork.platform.ids import TenantId
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.repository import list_audit_entries
from tests.adapters.adapter_files import DESCRIPTION, config_bytes, open_files, tensors, weights_bytes

NO_LIMITS = Quota()
SOMEONE = Caller("key", "key_1")
FILES = {seed: weights_bytes(tensors(seed)) for seed in range(6)}
BYTES = len(FILES[0])


class TwoTenants:
    """A registry with its store, which two tenants share."""

    def __init__(
        self, database: Database, root: Path, clock: ManualClock, inspector: AdapterInspector, grace_s: float = 0.0
    ) -> None:
        self.database = database
        self.root = root
        self.store = LocalArtifacts(root)
        self.forgotten: list[str] = []
        self.clock = clock
        self.inspector = inspector
        self.probed: list[str] = []
        self.probe_refusal: GraftworkError | None = None
        self.registry = AdapterRegistry(
            database,
            self.store,
            inspector,
            clock=clock,
            probe=self.probe,
            before_free=self.forget,
            grace_s=grace_s,
        )
        self.a = scope_of_tenant(AdminPrincipal(), TenantId("ten_a"))
        self.b = scope_of_tenant(AdminPrincipal(), TenantId("ten_b"))

    async def probe(self, digest: str) -> None:
        if not self.store.exists(digest):
            raise NotFound("The engine has no such artifact.")
        self.probed.append(digest)
        if self.probe_refusal is not None:
            raise self.probe_refusal

    async def forget(self, digest: str) -> None:
        assert self.store.exists(digest), "the engine is told before the files go"
        self.forgotten.append(digest)

    async def publish(
        self,
        name: str = "bot",
        seed: int = 0,
        scope: TenantScope | None = None,
        limits: Quota = NO_LIMITS,
        push: Push = PLAIN_PUSH,
        **config: Any,
    ) -> Adapter:
        with open_files(config_bytes(**config), FILES[seed]) as files:
            published = await self.registry.publish(scope or self.a, name, files, DESCRIPTION, limits, push)
        return published.adapter

    async def audited(self) -> list[tuple[str, str, str, dict[str, Any]]]:
        """The audit log, oldest first: who did what to what, and how."""
        async with self.database.read() as session:
            page = await list_audit_entries(session, PageRequest(100, order=Order.ASCENDING))
        return [(entry.actor, entry.action, entry.target, entry.details) for entry in page.items]

    @property
    def stored(self) -> set[str]:
        """The digests that the store holds, found by looking at the disk."""
        return {f"sha256:{path.parent.name}{path.name}" for path in self.root.glob("sha256/??/*")}
