"""Contains the SQL statements over people, their roles, and used sign-ins. Never commits: the caller does."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select, update

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import OrganisationId, PersonId, TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.people.person import Person
from graftwork.platform.people.roles import Grant, Role
from graftwork.platform.people.tables import PersonRow, RoleGrantRow, SpentSignInRow
from graftwork.platform.tenancy.repository import insert_once
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import Tenant, TenantStatus

_OPERATOR = select(PersonRow.id, PersonRow.operator_role, PersonRow.operator_hash)
_MOST_TENANTS = 1000


async def insert_person(session: WriteSession, person: Person) -> bool:
    """Adds a person. Returns False if the issuer's subject is known already."""
    values = {
        "id": person.id,
        "issuer": person.issuer,
        "subject": person.subject,
        "email": person.email,
        "groups": list(person.groups),
        "created_at": person.created_at,
    }
    return await insert_once(session, PersonRow, values)


async def find_person(session: ReadSession, person_id: PersonId) -> Person | None:
    row = await session.scalar(select(PersonRow).where(PersonRow.id == person_id))
    return None if row is None else await _with_grants(session, row)


async def hold_person(session: WriteSession, person_id: PersonId) -> Person | None:
    """Returns the person, and locks the row until the transaction ends."""
    row = await session.scalar(select(PersonRow).where(PersonRow.id == person_id).with_for_update())
    return None if row is None else await _with_grants(session, row)


async def hold_subject(session: WriteSession, issuer: str, subject: str) -> Person | None:
    """Returns the person of an issuer's subject, and locks the row until the transaction ends."""
    one = select(PersonRow).where(PersonRow.issuer == issuer, PersonRow.subject == subject)
    row = await session.scalar(one.with_for_update())
    return None if row is None else await _with_grants(session, row)


async def list_people(session: ReadSession, page: PageRequest, email: str | None, subject: str | None) -> Page[Person]:
    """Returns one page of all people, or of those with this e-mail address or subject."""
    statement = select(PersonRow)
    if email is not None:
        statement = statement.where(PersonRow.email == email)
    if subject is not None:
        statement = statement.where(PersonRow.subject == subject)
    is_ascending = page.order is Order.ASCENDING
    statement = statement.order_by(PersonRow.id if is_ascending else PersonRow.id.desc())
    if page.after:
        statement = statement.where(PersonRow.id > page.after if is_ascending else PersonRow.id < page.after)
    rows = (await session.scalars(statement.limit(page.limit + 1))).all()
    granted = await _grants_of(session, [row.id for row in rows])
    return cut([_person(row, granted.get(row.id, ())) for row in rows], page)


async def people_with_groups(session: ReadSession) -> list[PersonId]:
    """Returns the people who had a group with roles at their last sign-in."""
    rows = (await session.execute(select(PersonRow.id, PersonRow.groups))).all()
    return [PersonId(person_id) for person_id, groups in rows if groups]


async def people_on(session: ReadSession, places: Collection[str], groups: Collection[str]) -> set[PersonId]:
    """Returns the people with a role that was granted on one of these tenants and organisations, and those who had one of
    these groups at their last sign-in.
    """
    granted = await session.scalars(select(RoleGrantRow.person_id).where(RoleGrantRow.granted_on.in_(list(places))))
    found = {PersonId(person_id) for person_id in granted}
    if groups:
        rows = (await session.execute(select(PersonRow.id, PersonRow.groups))).all()
        found |= {PersonId(person_id) for person_id, held in rows if set(held) & set(groups)}
    return found


async def find_people(session: ReadSession, person_ids: Collection[PersonId]) -> list[Person]:
    """Returns the people with these ids, at most a page of them, oldest first."""
    chosen = select(PersonRow).where(PersonRow.id.in_(list(person_ids))).order_by(PersonRow.id)
    rows = (await session.scalars(chosen)).all()
    granted = await _grants_of(session, [row.id for row in rows])
    return [_person(row, granted.get(row.id, ())) for row in rows]


async def names_of(session: ReadSession, person_ids: Collection[str]) -> dict[str, str]:
    """Returns the names of people by their ids: e-mail addresses, or else subjects."""
    found = select(PersonRow.id, PersonRow.email, PersonRow.subject).where(PersonRow.id.in_(list(person_ids)))
    return {person_id: email or subject for person_id, email, subject in (await session.execute(found)).all()}


async def change_person(session: WriteSession, person_id: PersonId, changes: Mapping[str, Any]) -> None:
    await session.execute(update(PersonRow).where(PersonRow.id == person_id).values(**changes))


async def delete_person(session: WriteSession, person_id: PersonId) -> None:
    await session.execute(delete(RoleGrantRow).where(RoleGrantRow.person_id == person_id))
    await session.execute(delete(PersonRow).where(PersonRow.id == person_id))


async def find_operator(session: ReadSession, person_id: PersonId) -> tuple[Role, bytes] | None:
    """Returns the operator's role of a person and the hash under which tickets are sealed, or None without such a role."""
    row = (await session.execute(_OPERATOR.where(PersonRow.id == person_id))).one_or_none()
    if row is None or row.operator_role is None or row.operator_hash is None:
        return None
    return Role(row.operator_role), row.operator_hash


# Roles


async def add_grant(session: WriteSession, person_id: PersonId, grant: Grant, now: float) -> bool:
    """Grants a role. Returns False if the person has it already."""
    values = {"person_id": person_id, "role": str(grant.role), "granted_on": grant.on, "granted_at": now}
    return await insert_once(session, RoleGrantRow, values)


async def remove_grant(session: WriteSession, person_id: PersonId, grant: Grant) -> None:
    await session.execute(
        delete(RoleGrantRow).where(
            RoleGrantRow.person_id == person_id,
            RoleGrantRow.role == str(grant.role),
            RoleGrantRow.granted_on == grant.on,
        )
    )


async def erase_grants(session: WriteSession, tenant_id: TenantId) -> None:
    """Deletes all roles that were granted in a deleted tenant."""
    await session.execute(delete(RoleGrantRow).where(RoleGrantRow.granted_on == tenant_id))


async def tenants_on(session: ReadSession, places: Collection[str]) -> list[Tenant]:
    """Returns the active tenants with these ids, or of the organisations with these ids: 1,000 at most, by name."""
    on = TenantRow.id.in_(list(places)) | TenantRow.organisation_id.in_(list(places))
    statement = select(TenantRow).where(on, TenantRow.status == str(TenantStatus.ACTIVE))
    rows = await session.scalars(statement.order_by(TenantRow.name, TenantRow.id).limit(_MOST_TENANTS))
    return [
        Tenant(
            id=TenantId(row.id),
            name=row.name,
            status=TenantStatus(row.status),
            weight=row.weight,
            service_tier_ceiling=row.service_tier_ceiling,
            created_at=row.created_at,
            organisation_id=None if row.organisation_id is None else OrganisationId(row.organisation_id),
        )
        for row in rows
    ]


# Used sign-ins


async def spend(session: WriteSession, digest: str, ends_at: float) -> bool:
    """Marks a sign-in as used. Returns False if it was used before."""
    return await insert_once(session, SpentSignInRow, {"digest": digest, "ends_at": ends_at})


async def drop_spent(session: WriteSession, now: float) -> None:
    """Deletes the marks of sign-ins that have ended by themselves at `now`, in unix seconds."""
    await session.execute(delete(SpentSignInRow).where(SpentSignInRow.ends_at < now))


async def _with_grants(session: ReadSession, row: PersonRow) -> Person:
    return _person(row, (await _grants_of(session, [row.id])).get(row.id, ()))


async def _grants_of(session: ReadSession, person_ids: Sequence[str]) -> dict[str, list[Grant]]:
    found: dict[str, list[Grant]] = {}
    if not person_ids:
        return found
    rows = await session.scalars(select(RoleGrantRow).where(RoleGrantRow.person_id.in_(person_ids)))
    for row in rows:
        found.setdefault(row.person_id, []).append(Grant(Role(row.role), row.granted_on))
    return found


def _person(row: PersonRow, granted: Sequence[Grant]) -> Person:
    return Person(
        id=PersonId(row.id),
        issuer=row.issuer,
        subject=row.subject,
        email=row.email,
        groups=tuple(row.groups),
        operator_role=None if row.operator_role is None else Role(row.operator_role),
        created_at=row.created_at,
        signed_in_at=row.signed_in_at,
        suspended_at=row.suspended_at,
        operator_hash=row.operator_hash,
        granted=tuple(sorted(granted)),
    )
