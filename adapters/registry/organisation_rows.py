"""Contains the SQL statements over what all tenants of an organisation keep together.

Never commits: the caller that opened the session does.
"""

from dataclasses import dataclass

from sqlalchemy import exists, func, select

from graftwork.adapters.inspection.upload import AdapterUsage
from graftwork.adapters.registry.tables import AdapterRow, AdapterVersionRow
from graftwork.platform.database import WriteSession
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.quota_rows import hold_organisation_quota
from graftwork.platform.tenancy.tables import TenantRow


@dataclass(frozen=True, slots=True)
class HeldOrganisation:
    """The limits of a tenant's organisation, and what counts in them."""

    quota: Quota
    usage: AdapterUsage
    """The adapters and bytes of all its tenants. What was deleted counts until it can no longer be restored."""


async def hold_organisation(session: WriteSession, scope: TenantScope) -> HeldOrganisation | None:
    """Returns what a tenant's organisation may keep and keeps; None if it has no limits.

    Locks its limits until the transaction ends, so that no two of its tenants pass them together.
    """
    held = await hold_organisation_quota(session, scope)
    if held is None:
        return None
    organisation_id, quota = held
    tenants = select(TenantRow.id).where(TenantRow.organisation_id == organisation_id)
    kept = exists().where(
        AdapterVersionRow.tenant_id == AdapterRow.tenant_id, AdapterVersionRow.adapter_id == AdapterRow.id
    )
    adapters = select(func.count()).select_from(AdapterRow).where(AdapterRow.tenant_id.in_(tenants), kept)
    stored = select(func.coalesce(func.sum(AdapterVersionRow.size_bytes), 0)).where(
        AdapterVersionRow.tenant_id.in_(tenants)
    )
    usage = AdapterUsage(await session.scalar(adapters) or 0, await session.scalar(stored) or 0)
    return HeldOrganisation(quota, usage)
