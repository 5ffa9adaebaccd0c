"""Contains the SQL statements that manage API keys, and that number the changes of access.

Each statement about a tenant's keys is restricted to this tenant. The statements that find the tenant of a request are
in `request_rows.py`.
Invariant: whatever changes who has access adds one to the number of changes in the same transaction, as its last
statement. So two transactions never wait for each other, and who reads the same number twice has missed nothing.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import bindparam, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import KeyId, PersonId, TenantId
from graftwork.platform.pagination import Page, PageRequest, cut
from graftwork.platform.tenancy.repository import page_of
from graftwork.platform.tenancy.tables import AccessChangesRow, ApiKeyRow
from graftwork.platform.tenancy.tenants import ApiKey

_ACCESS = "access"
_NUMBER = select(AccessChangesRow.number).where(AccessChangesRow.id == _ACCESS)
_NOTE_USED = (
    update(ApiKeyRow.__table__)  # type: ignore[arg-type]
    .where(ApiKeyRow.id == bindparam("key_id"), ApiKeyRow.tenant_id == bindparam("of_tenant"))
    .where(or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at < bindparam("used_at")))
    .values(last_used_at=bindparam("used_at"))
)


async def add_key(session: WriteSession, key: ApiKey) -> None:
    session.add(
        ApiKeyRow(
            id=key.id,
            tenant_id=key.tenant_id,
            name=key.name,
            public_id=key.public_id,
            key_hash=key.key_hash,
            scopes=sorted(key.scopes),
            adapters=None if key.adapters is None else sorted(key.adapters),
            allowed_ips=None if key.allowed_ips is None else list(key.allowed_ips),
            created_at=key.created_at,
            expires_at=key.expires_at,
            person_id=key.person_id,
            first_key_id=key.first_key_id,
        )
    )
    await session.flush()


async def find_key(session: ReadSession, tenant_id: TenantId, key_id: KeyId) -> ApiKey | None:
    statement = select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
    row = await session.scalar(statement)
    return _key(row) if row else None


async def find_person_key(session: ReadSession, person_id: PersonId, tenant_id: TenantId) -> ApiKey | None:
    """Returns the key with which a person acts in a tenant, also if it is closed."""
    row = await session.scalar(
        select(ApiKeyRow).where(ApiKeyRow.person_id == person_id, ApiKeyRow.tenant_id == tenant_id)
    )
    return _key(row) if row else None


async def list_person_keys(session: ReadSession, person_id: PersonId) -> list[ApiKey]:
    """Returns the keys with which a person acts in tenants, also those that are closed."""
    rows = await session.scalars(select(ApiKeyRow).where(ApiKeyRow.person_id == person_id).order_by(ApiKeyRow.id))
    return [_key(row) for row in rows]


async def find_people_of_tenant(session: ReadSession, tenant_id: TenantId) -> list[PersonId]:
    """Returns the people who have a key of a tenant."""
    found = select(ApiKeyRow.person_id).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.person_id.is_not(None))
    return [PersonId(person_id) for person_id in await session.scalars(found.order_by(ApiKeyRow.id)) if person_id]


async def list_keys(session: ReadSession, tenant_id: TenantId, page: PageRequest) -> Page[ApiKey]:
    rows = await page_of(session, select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id), ApiKeyRow, page)
    return cut([_key(row) for row in rows], page)


async def change_key(session: WriteSession, tenant_id: TenantId, key_id: KeyId, changes: Mapping[str, Any]) -> None:
    statement = update(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
    await session.execute(statement.values(**changes))


async def note_used(session: WriteSession, uses: Mapping[KeyId, tuple[TenantId, float]]) -> None:
    """Stores when keys were last used, in unix seconds. An earlier time never replaces a later one."""
    rows = [{"key_id": key, "of_tenant": tenant, "used_at": at} for key, (tenant, at) in sorted(uses.items())]
    await (await session.connection()).execute(_NOTE_USED, rows)


async def count_access_change(session: WriteSession) -> None:
    """Adds one to the number of changes. It must be the last statement of its transaction."""
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    first = insert(AccessChangesRow).values(id=_ACCESS, number=1)
    one_more = {"number": AccessChangesRow.number + 1}
    await session.execute(first.on_conflict_do_update(index_elements=["id"], set_=one_more))


async def find_access_changes(session: ReadSession) -> int:
    """Returns how often the access of a key or tenant has been changed."""
    return int((await session.execute(_NUMBER)).scalar_one_or_none() or 0)


def _key(row: ApiKeyRow) -> ApiKey:
    return ApiKey(
        id=KeyId(row.id),
        tenant_id=TenantId(row.tenant_id),
        name=row.name,
        public_id=row.public_id,
        scopes=frozenset(row.scopes),
        adapters=None if row.adapters is None else frozenset(row.adapters),
        allowed_ips=None if row.allowed_ips is None else tuple(row.allowed_ips),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        replaced_by=None if row.replaced_by is None else KeyId(row.replaced_by),
        key_hash=row.key_hash,
        person_id=None if row.person_id is None else PersonId(row.person_id),
        first_key_id=None if row.first_key_id is None else KeyId(row.first_key_id),
    )
