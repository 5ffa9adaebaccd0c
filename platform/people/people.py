"""Manages people: who they are, which roles they have, and whether they are suspended.

Owns every change to people and roles. Each adds an entry to the audit log, and makes what the person acts with fit the
new roles (`seats.py`), in the same transaction. Other gateways follow within a second, as for keys: the change is
counted (`tenancy/key_rows.py`), and the work that a lost role has started ends.
Never signs anybody in: `sign_in.py` does. Never sees a token of the identity provider.
"""

from dataclasses import replace
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.ids import OrganisationId, PersonId, TenantId, new_id
from graftwork.platform.pagination import FIRST_PAGE, Order, Page, PageRequest, cut
from graftwork.platform.people import repository as rows
from graftwork.platform.people.person import Identity, Member, Person, Seats
from graftwork.platform.people.roles import Grant, GroupRoles, role_in, roles_by_groups
from graftwork.platform.people.seats import Settled, seats_of, settle
from graftwork.platform.tenancy import key_rows, organisation_rows, repository
from graftwork.platform.tenancy.limit_book import NO_TENANT
from graftwork.platform.tenancy.principals import RunningWork, TenantScope
from graftwork.platform.tenancy.tenants import AuditEntry
from graftwork.platform.tenancy.verified_keys import AccessChanges

_MOST_SUBJECT_CHARACTERS = 255
_MOST_EMAIL_CHARACTERS = 320


class People:
    """Reads and changes people. `actor` is who makes a change, for the audit log."""

    def __init__(
        self, database: Database, clock: Clock, changes: AccessChanges, work: RunningWork, group_roles: GroupRoles
    ) -> None:
        """`group_roles` are the roles by groups that the settings name; `work` is what runs in this process."""
        self._database = database
        self._clock = clock
        self._changes = changes
        self._work = work
        self._group_roles = group_roles

    async def list(
        self, page: PageRequest = FIRST_PAGE, *, email: str | None = None, subject: str | None = None
    ) -> Page[Person]:
        """Returns one page of the people; only those with this e-mail address or subject, if one is given."""
        async with self._database.read() as session:
            found = await rows.list_people(session, page, email, subject)
        return replace(found, items=tuple(self.with_groups(person) for person in found.items))

    async def get(self, person_id: PersonId) -> Person:
        """Returns a person. Raises NotFound."""
        async with self._database.read() as session:
            return self.existing(await rows.find_person(session, person_id), person_id)

    async def members(self, tenant_id: TenantId, page: PageRequest = FIRST_PAGE) -> Page[Member]:
        """Returns one page of the people who have a role in a tenant, granted or by a group, there or by its organisation.

        Raises NotFound for an unknown tenant.
        """
        async with self._database.read() as session:
            tenant = await repository.find_tenant(session, tenant_id)
            if tenant is None:
                raise NotFound(f"There is no tenant {tenant_id!r}.")
            places = {str(place) for place in (tenant.id, tenant.organisation_id) if place is not None}
            groups = [name for name, grants in self._group_roles.items() if any(grant.on in places for grant in grants)]
            is_ascending = page.order is Order.ASCENDING
            ids = sorted(await rows.people_on(session, places, groups), reverse=not is_ascending)
            if page.after is not None:
                ids = [one for one in ids if (one > page.after if is_ascending else one < page.after)]
            chosen = cut(ids, page)
            by_id = {person.id: person for person in await rows.find_people(session, chosen.items)}
        found = [self.with_groups(by_id[one]) for one in chosen.items if one in by_id]
        members = [(person, role_in(person.grants, tenant)) for person in found]
        return Page(tuple(Member(person, role) for person, role in members if role is not None), chosen.has_more)

    async def seats(self, person_id: PersonId) -> tuple[Person, Seats]:
        """Returns a person, and as what the person may act now. Raises NotFound."""
        async with self._database.read() as session:
            person = self.existing(await rows.find_person(session, person_id), person_id)
            return person, await seats_of(session, person)

    async def names(self, actors: set[str]) -> dict[str, str]:
        """Returns the names of those actors of audit entries who are people, by their ids."""
        people = {actor for actor in actors if actor.startswith("per_")}
        if not people:
            return {}
        async with self._database.read() as session:
            return await rows.names_of(session, people)

    async def add(self, issuer: str, subject: str, email: str | None, *, actor: str = "admin") -> Person:
        """Adds a person who has not signed in yet, so that roles can be granted. Returns the person.

        Raises Conflict if the person is known, and ValidationFailed for a value that is empty or too long.
        """
        if not 1 <= len(subject) <= _MOST_SUBJECT_CHARACTERS:
            raise ValidationFailed(f"subject has 1 to {_MOST_SUBJECT_CHARACTERS} characters.", param="subject")
        if email is not None and not 1 <= len(email) <= _MOST_EMAIL_CHARACTERS:
            raise ValidationFailed(f"email has 1 to {_MOST_EMAIL_CHARACTERS} characters.", param="email")
        person = self._new(Identity(issuer, subject, email))
        async with self._database.write() as session:
            if not await rows.insert_person(session, person):
                raise Conflict(f"The person {subject!r} of {issuer} is known already.", code="person_exists")
            await self.audit(session, actor, "person.added", person, {})
        return person

    async def grant(self, person_id: PersonId, grant: Grant, *, actor: str = "admin") -> Person:
        """Grants a role to a person, who may have it already. Returns the person.

        Raises NotFound for an unknown person, tenant or organisation.
        """
        async with self._database.write() as session:
            person = self.existing(await rows.hold_person(session, person_id), person_id)
            await _require_place(session, grant)
            if await rows.add_grant(session, person_id, grant, self._clock.now()):
                await self.audit(session, actor, "person.role_granted", person, {"role": grant.text}, grant)
                person = replace(person, granted=tuple(sorted({*person.granted, grant})))
            settled = await self.settle(session, person)
        return self.announce(settled)

    async def revoke(self, person_id: PersonId, grant: Grant, *, actor: str = "admin") -> Person:
        """Takes back a role that was granted, and ends what the person does by it. Returns the person.

        Raises NotFound for an unknown person and for a role that was not granted.
        """
        async with self._database.write() as session:
            person = self.existing(await rows.hold_person(session, person_id), person_id)
            if grant not in person.granted:
                raise NotFound(f"The role {grant.text!r} was not granted to {person_id!r}.")
            await rows.remove_grant(session, person_id, grant)
            await self.audit(session, actor, "person.role_revoked", person, {"role": grant.text}, grant)
            person = replace(person, granted=tuple(one for one in person.granted if one != grant))
            settled = await self.settle(session, person)
        return self.announce(settled)

    async def suspend(self, person_id: PersonId, *, actor: str = "admin") -> Person:
        """Suspends a person: ends all sessions and tokens of the person on every gateway, and refuses new ones.

        Raises NotFound.
        """
        return await self._suspend(person_id, self._clock.now(), "person.suspended", actor)

    async def resume(self, person_id: PersonId, *, actor: str = "admin") -> Person:
        """Ends the suspension of a person, who must sign in again. Raises NotFound."""
        return await self._suspend(person_id, None, "person.resumed", actor)

    async def delete(self, person_id: PersonId, *, actor: str = "admin") -> None:
        """Deletes a person with name, roles, sessions and tokens. The audit log keeps the id. Raises NotFound."""
        async with self._database.write() as session:
            person = self.existing(await rows.hold_person(session, person_id), person_id)
            settled = await self.settle(session, replace(person, suspended_at=self._clock.now()))
            for seat in await key_rows.list_person_keys(session, person_id):
                await key_rows.change_key(session, seat.tenant_id, seat.id, {"name": person_id})
            await rows.delete_person(session, person_id)
            await self.audit(session, actor, "person.deleted", person, {})
            await key_rows.count_access_change(session)
        self.announce(replace(settled, has_changed=True))

    async def settle_all(self) -> None:
        """Makes what people act with fit the roles by groups of these settings. Call it when a gateway starts."""
        async with self._database.read() as session:
            with_groups = await rows.people_with_groups(session)
        for person_id in with_groups:
            async with self._database.write() as session:
                person = await rows.hold_person(session, person_id)
                settled = None if person is None else await self.settle(session, self.with_groups(person))
            if settled is not None:
                self.announce(settled)

    async def settle_tenant(self, session: WriteSession, tenant_id: TenantId) -> None:
        """Makes the seats in a tenant fit, after it was moved to another organisation in this transaction.

        All gateways, this one too, follow within a second.
        """
        has_changed = False
        for person_id in await key_rows.find_people_of_tenant(session, tenant_id):
            person = await rows.hold_person(session, person_id)
            if person is not None:
                has_changed |= (await settle(session, self.with_groups(person), self._clock.now())).has_changed
        if has_changed:
            await key_rows.count_access_change(session)

    async def erase(self, scope: TenantScope) -> bool:
        """Deletes the roles in a deleted tenant. Returns True."""
        async with self._database.write() as session:
            await rows.erase_grants(session, scope)
        return True

    # What sign-ins share

    def with_groups(self, person: Person) -> Person:
        """Returns the person with the roles by groups."""
        return replace(person, mapped=tuple(sorted(roles_by_groups(self._group_roles, person.groups))))

    def known_groups(self, groups: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the groups that give a role. No others are stored."""
        return tuple(sorted(set(groups) & set(self._group_roles)))

    def existing(self, person: Person | None, person_id: str) -> Person:
        """Returns a person who was found, with the roles by groups. Raises NotFound for None."""
        if person is None:
            raise NotFound(f"There is no person {person_id!r}.")
        return self.with_groups(person)

    async def hold(self, session: WriteSession, identity: Identity) -> Person:
        """Returns the person of an identity, whose row is locked; adds a person who is new."""
        found = await rows.hold_subject(session, identity.issuer, identity.subject)
        if found is None:
            new = self._new(identity)
            if await rows.insert_person(session, new):
                await self.audit(session, new.id, "person.added", new, {})
            found = await rows.hold_subject(session, identity.issuer, identity.subject)
        assert found is not None
        return self.with_groups(found)

    async def settle(self, session: WriteSession, person: Person) -> Settled:
        """Makes what a person acts with fit. It must be the last of its transaction: it counts the change."""
        settled = await settle(session, person, self._clock.now())
        if settled.has_changed:
            await key_rows.count_access_change(session)
        return settled

    def announce(self, settled: Settled) -> Person:
        """Ends the work of seats that were closed, in this process. Call it after the transaction. Returns the person."""
        if settled.has_changed:
            self._changes.note_change()
        for key_id in settled.closed:
            self._work.end_key(key_id)
        return settled.person

    async def audit(
        self,
        session: WriteSession,
        actor: str,
        action: str,
        person: Person,
        details: dict[str, Any],
        grant: Grant | None = None,
    ) -> None:
        """Adds an entry to the audit log. It names the person by id: the log outlives their names."""
        tenant_id = TenantId(grant.on) if grant is not None and grant.on.startswith("ten_") else NO_TENANT
        entry = AuditEntry(new_id("aud"), self._clock.now(), actor, action, tenant_id, person.id, details)
        await repository.add_audit_entry(session, entry)

    async def _suspend(self, person_id: PersonId, at: float | None, action: str, actor: str) -> Person:
        async with self._database.write() as session:
            person = self.existing(await rows.hold_person(session, person_id), person_id)
            if (person.suspended_at is None) == (at is None):
                return person
            await rows.change_person(session, person_id, {"suspended_at": at})
            await self.audit(session, actor, action, person, {})
            settled = await self.settle(session, replace(person, suspended_at=at))
        return self.announce(settled)

    def _new(self, identity: Identity) -> Person:
        return Person(
            id=PersonId(new_id("per")),
            issuer=identity.issuer,
            subject=identity.subject,
            email=identity.email,
            groups=(),
            operator_role=None,
            created_at=self._clock.now(),
            signed_in_at=None,
            suspended_at=None,
        )


async def _require_place(session: ReadSession, grant: Grant) -> None:
    """Raises NotFound if the tenant or organisation of a grant does not exist."""
    if grant.on.startswith("ten_") and await repository.find_tenant(session, TenantId(grant.on)) is None:
        raise NotFound(f"There is no tenant {grant.on!r}.")
    if grant.on.startswith("org_"):
        found = await organisation_rows.find_organisation(session, OrganisationId(grant.on))
        if found is None:
            raise NotFound(f"There is no organisation {grant.on!r}.")
