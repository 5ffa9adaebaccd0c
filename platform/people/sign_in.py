"""Signs people in: from what the identity provider says of a person to a ticket with which the person acts.

    Identity ─► person (added if new, e-mail and groups renewed) ─► seats ─► ticket of the first seat, or of the wanted one

A ticket acts as one thing: as an operator, or in one tenant. `switch` gives the same session another seat.
Owns the marks of sign-ins that were used, so that a state or an ID token works once. Never speaks to the provider.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import NotAuthenticated, NotPermitted
from graftwork.platform.ids import PersonId, TenantId
from graftwork.platform.keys.console_tickets import TICKET_FOR_S, ConsoleTicket, parse_ticket, ticket_of_seat
from graftwork.platform.keys.keys import KeyKind
from graftwork.platform.people import repository as rows
from graftwork.platform.people.people import People
from graftwork.platform.people.person import Identity, Person, Seats, TenantSeat
from graftwork.platform.people.roles import operator_role
from graftwork.platform.people.seats import Settled, seats_of, settle, take_seat
from graftwork.platform.tenancy import key_rows


@dataclass(frozen=True, slots=True)
class SeatHash:
    """What tickets of a seat name, and what they are sealed under."""

    kind: KeyKind
    public_id: str
    key_hash: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A person who has just signed in, with a ticket for each thing that the person can act as."""

    person: Person
    seats: Seats
    operator: ConsoleTicket | None
    tenant: ConsoleTicket | None
    tenant_seat: TenantSeat | None
    """The seat of the ticket `tenant`."""


SPENT_FOR_S = 3600.0
"""For how long a used sign-in is remembered. States and ID tokens that are older are refused by their age."""


class SignIns:
    """Makes the tickets of people. `pepper` seals them."""

    def __init__(self, database: Database, clock: Clock, people: People, pepper: bytes) -> None:
        self._database = database
        self._clock = clock
        self._people = people
        self._pepper = pepper

    async def open_console(self, identity: Identity, state: str, session_s: float) -> ConsoleTicket:
        """Signs a person in to the console: as an operator if the person is one, or else in the first tenant.

        `state` is that of the sign-in, which works once. The session ends after `session_s` seconds, or when the provider
        says. Raises NotPermitted for a person who is suspended or has no role, and NotAuthenticated for a used state.
        """
        now = self._clock.now()
        ends = min(now + session_s, identity.ends_at or math.inf)
        async with self._database.write() as session:
            person, seats, settled = await self._enter(session, identity, state)
            await self._people.audit(session, person.id, "person.signed_in", person, {})
            seat = None
            if seats.operator is not None:
                seat = await self._operator_seat(session, person)
            elif seats.tenants:
                seat = await self._tenant_seat(session, person, seats.tenants[0].tenant_id)
            await self._count(session, settled)
        self._people.announce(settled)
        if seat is None:
            raise no_role(person)
        return self._ticket(seat, ends, now + TICKET_FOR_S)

    async def exchange(self, identity: Identity, token: str, tenant: str | None, token_s: float) -> SignedIn:
        """Signs a person in at the command line: gives tickets for all that the person needs there.

        These are a ticket as an operator, and one in the tenant of this id or name, or in the only one. They end after
        `token_s` seconds and cannot be renewed. `token` is the ID token, which works once. The audit log gets an entry
        each time that tickets are given.
        Raises NotPermitted for a person who is suspended, has no role, or none in the wanted tenant, and NotAuthenticated
        for a used token.
        """
        ends = min(self._clock.now() + token_s, identity.ends_at or math.inf)
        async with self._database.write() as session:
            person, seats, settled = await self._enter(session, identity, token)
            chosen = seats.tenant(tenant)
            operator = None if seats.operator is None else await self._operator_seat(session, person)
            seat = None if chosen is None else await self._tenant_seat(session, person, chosen.tenant_id)
            if operator is not None or seat is not None:
                acts = {"operator": operator is not None, "tenant_id": None if chosen is None else chosen.tenant_id}
                await self._people.audit(session, person.id, "person.tokens_issued", person, acts)
            await self._count(session, settled)
        self._people.announce(settled)
        if seats.operator is None and not seats.tenants:
            raise no_role(person)
        if tenant is not None and chosen is None:
            names = ", ".join(f"{one.tenant_id} ({one.tenant_name})" for one in seats.tenants) or "none"
            message = f"You have a role in no tenant {tenant!r}, or in several of this name; yours are: {names}."
            raise NotPermitted(message, code="no_role")
        return SignedIn(
            person,
            seats,
            None if operator is None else self._ticket(operator, ends, ends),
            None if seat is None else self._ticket(seat, ends, ends),
            chosen,
        )

    async def switch(self, person_id: PersonId, token: str, tenant_id: TenantId | None) -> ConsoleTicket:
        """Returns the ticket with which the session of the ticket `token` goes on as an operator, for None, or in a tenant.

        `token` has authenticated the person. Raises NotPermitted for a role that the person does not have.
        """
        present = parse_ticket(token)
        if present is None:
            raise NotAuthenticated("Sign in to the console first.", code="missing_console_session")
        async with self._database.write() as session:
            person = self._people.existing(await rows.hold_person(session, person_id), person_id)
            settled = await settle(session, person, self._clock.now())
            if tenant_id is not None:
                seat = await self._tenant_seat(session, person, tenant_id)
            elif operator_role(person.effective) is not None:
                seat = await self._operator_seat(session, person)
            else:
                raise NotPermitted("You are no operator; choose a tenant.", code="no_role")
            await self._count(session, settled)
        self._people.announce(settled)
        return present.for_seat(seat.kind, seat.public_id, seat.key_hash, self._pepper)

    async def sweep(self) -> None:
        """Deletes the marks of used sign-ins that have ended by themselves."""
        async with self._database.write() as session:
            await rows.drop_spent(session, self._clock.now())

    async def _enter(self, session: WriteSession, identity: Identity, secret: str) -> tuple[Person, Seats, Settled]:
        """Finds or adds the person of an identity, and makes what the person acts with fit the roles of now.

        `secret` is what works once. Raises NotAuthenticated if it was used, and NotPermitted for a suspended person.
        """
        digest, now = hashlib.sha256(secret.encode()).hexdigest(), self._clock.now()
        if not await rows.spend(session, digest, now + SPENT_FOR_S):
            raise NotAuthenticated("This sign-in was used before; sign in again.", code="sign_in_used")
        found = await self._people.hold(session, identity)
        if found.suspended_at is not None:
            raise NotPermitted("You are suspended; ask the operator.", code="person_suspended")
        groups = self._people.known_groups(identity.groups)
        changes = {"email": identity.email, "groups": list(groups), "signed_in_at": now}
        await rows.change_person(session, found.id, changes)
        person = self._people.with_groups(replace(found, email=identity.email, groups=groups, signed_in_at=now))
        settled = await settle(session, person, now)
        return person, await seats_of(session, person), settled

    async def _count(self, session: WriteSession, settled: Settled) -> None:
        """Counts the change of access, if there is one. It must be the last of its transaction."""
        if settled.has_changed:
            await key_rows.count_access_change(session)

    async def _operator_seat(self, session: WriteSession, person: Person) -> SeatHash:
        found = await rows.find_operator(session, person.id)
        assert found is not None  # the roles were settled in this transaction
        return SeatHash(KeyKind.ADMIN, person.public_id, found[1])

    async def _tenant_seat(self, session: WriteSession, person: Person, tenant_id: TenantId) -> SeatHash:
        seat = await take_seat(session, person, tenant_id, self._clock.now())
        return SeatHash(KeyKind.TENANT, seat.public_id, seat.key_hash)

    def _ticket(self, seat: SeatHash, ends: float, until: float) -> ConsoleTicket:
        return ticket_of_seat(seat.kind, seat.public_id, seat.key_hash, ends=ends, until=until, pepper=self._pepper)


def no_role(person: Person) -> NotPermitted:
    """Returns the error for a person without any role. It names the person as the operator must."""
    return NotPermitted(
        f"{person.name} ({person.id}) has no role here; ask the operator for one.",
        code="no_role",
        details={"person": person.id},
    )
