"""Contains the SQL statements over the adapters that count in the limits of an owner, such as an organisation or a key.

Never commits: the caller that opened the session does.
"""

from dataclasses import dataclass

from sqlalchemy import and_, func, select

from graftwork.adapters.inspection.upload import AdapterUsage
from graftwork.adapters.registry.tables import AdapterRow, AdapterVersionRow
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.quotas.limits import Level
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.quota_rows import hold_organisation_quota, tenants_of


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
    return HeldOrganisation(quota, await usage_of(session, LimitOwner.organisation(organisation_id)))


async def usage_of(session: ReadSession, owner: LimitOwner) -> AdapterUsage:
    """Returns the adapters and bytes that count in the limits of an owner.

    What was deleted counts until it can no longer be restored. A key and an end user have the adapters that they have
    pushed first, in all versions.
    """
    mine = [tenants_of(owner.owner_id, owner.tenant_id, AdapterRow.tenant_id)]
    if owner.level is Level.KEY:
        mine.append(AdapterRow.key_id == owner.owner_id)
    elif owner.level is Level.USER:
        mine.append(AdapterRow.end_user_id == owner.owner_id)
    statement = (
        select(func.count(AdapterRow.id.distinct()), func.coalesce(func.sum(AdapterVersionRow.size_bytes), 0))
        .join(
            AdapterVersionRow,
            and_(AdapterVersionRow.adapter_id == AdapterRow.id, AdapterVersionRow.tenant_id == AdapterRow.tenant_id),
        )
        .where(*mine)
    )
    num_adapters, stored_bytes = (await session.execute(statement)).one()
    return AdapterUsage(num_adapters, int(stored_bytes))
