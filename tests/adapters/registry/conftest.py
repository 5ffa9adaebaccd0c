"""A registry that two tenants share, on SQLite and then on PostgreSQL."""

from pathlib import Path

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.repository import add_tenant
from graftwork.platform.tenancy.tenants import Tenant, TenantStatus
from tests.adapters.registry.two_tenants import TwoTenants


@pytest.fixture
async def two_tenants(
    database: Database, tmp_path: Path, manual_clock: ManualClock, inspector: AdapterInspector
) -> TwoTenants:
    async with database.write() as session:
        for name in ("ten_a", "ten_b"):
            await add_tenant(session, Tenant(TenantId(name), name, TenantStatus.ACTIVE, 1.0, "default", 0.0))
    return TwoTenants(database, tmp_path / "artifacts", manual_clock, inspector)


@pytest.fixture
def with_grace(two_tenants: TwoTenants) -> TwoTenants:
    """The same registry, in which what was deleted can be restored for 100 s."""
    root, clock, inspector = two_tenants.root, two_tenants.clock, two_tenants.inspector
    return TwoTenants(two_tenants.database, root, clock, inspector, grace_s=100.0)
