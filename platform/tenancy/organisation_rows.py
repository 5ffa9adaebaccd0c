"""Contains the SQL statements over organisations, and over which tenants belong to them.

Never commits: the caller that opened the session does. A tenant that is written here has been held by the caller.
"""

from sqlalchemy import delete, exists, select, update

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import OrganisationId, TenantId
from graftwork.platform.pagination import Page, PageRequest, cut
from graftwork.platform.tenancy.repository import page_of
from graftwork.platform.tenancy.tables import OrganisationRow, OwnerQuotaRow, TenantRow
from graftwork.platform.tenancy.tenants import Organisation, TenantStatus


async def add_organisation(session: WriteSession, organisation: Organisation) -> None:
    session.add(OrganisationRow(id=organisation.id, name=organisation.name, created_at=organisation.created_at))
    await session.flush()


async def find_organisation(session: ReadSession, organisation_id: OrganisationId) -> Organisation | None:
    row = await session.get(OrganisationRow, organisation_id)
    return _organisation(row) if row else None


async def hold_organisation(session: WriteSession, organisation_id: OrganisationId) -> Organisation | None:
    """Returns the organisation, and locks its row until the transaction ends. Returns None if it is unknown."""
    statement = select(OrganisationRow).where(OrganisationRow.id == organisation_id).with_for_update()
    row = await session.scalar(statement)
    return _organisation(row) if row else None


async def list_organisations(session: ReadSession, page: PageRequest) -> Page[Organisation]:
    rows = await page_of(session, select(OrganisationRow), OrganisationRow, page)
    return cut([_organisation(row) for row in rows], page)


async def rename_organisation(session: WriteSession, organisation_id: OrganisationId, name: str) -> None:
    await session.execute(update(OrganisationRow).where(OrganisationRow.id == organisation_id).values(name=name))


async def has_tenants(session: ReadSession, organisation_id: OrganisationId) -> bool:
    """Returns whether a tenant that was not deleted belongs to the organisation."""
    mine = exists().where(TenantRow.organisation_id == organisation_id, TenantRow.status != TenantStatus.DELETED)
    return bool(await session.scalar(select(mine)))


async def delete_organisation(session: WriteSession, organisation_id: OrganisationId) -> None:
    """Deletes an organisation with its limits. Deleted tenants no longer belong to it; its usage records stay."""
    left = update(TenantRow).where(TenantRow.organisation_id == organisation_id).values(organisation_id=None)
    await session.execute(left)
    await session.execute(delete(OwnerQuotaRow).where(OwnerQuotaRow.owner_id == organisation_id))
    await session.execute(delete(OrganisationRow).where(OrganisationRow.id == organisation_id))


async def move_tenant(session: WriteSession, tenant_id: TenantId, organisation_id: OrganisationId | None) -> None:
    """Makes a tenant belong to an organisation, or to none."""
    await session.execute(update(TenantRow).where(TenantRow.id == tenant_id).values(organisation_id=organisation_id))


async def organisation_of(session: ReadSession, tenant_id: TenantId) -> OrganisationId | None:
    """Returns the organisation that a tenant belongs to; None for none."""
    found = await session.scalar(select(TenantRow.organisation_id).where(TenantRow.id == tenant_id))
    return None if found is None else OrganisationId(found)


def _organisation(row: OrganisationRow) -> Organisation:
    return Organisation(OrganisationId(row.id), row.name, row.created_at)
