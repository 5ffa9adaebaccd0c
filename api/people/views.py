"""Defines the bodies of the routes for people, and converts people and what they may do to answers."""

from typing import Annotated, Any

from pydantic import Field

from graftwork.api.deps.people import PeopleResources
from graftwork.api.schemas.base import NativeBody
from graftwork.platform.answers import people as answers
from graftwork.platform.keys.console_tickets import ConsoleTicket
from graftwork.platform.people.person import Member, Person, Seats, TenantSeat
from graftwork.platform.people.roles import GRANT_PATTERN, sorted_texts
from graftwork.platform.people.sign_in import SignedIn
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal

Id = Annotated[str, Field(min_length=1, max_length=64)]


class PersonBody(NativeBody):
    """The body of a request that adds a person who has not signed in yet."""

    subject: Annotated[str, Field(min_length=1, max_length=255)]
    """The person's id at the identity provider: the claim `sub`."""
    email: Annotated[str, Field(min_length=1, max_length=320)] | None = None
    """What to call the person until the first sign-in."""
    issuer: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """The identity provider. The default is the one of the settings."""


class RoleBody(NativeBody):
    """The body of a request that grants a role or takes it back."""

    role: Annotated[str, Field(min_length=1, max_length=100, json_schema_extra={"pattern": GRANT_PATTERN})]
    """`operator`, `operator-readonly`, or `tenant-admin`, `tenant-member` or `tenant-viewer` with `:` and the id of a
    tenant or an organisation.
    """


class TokensBody(NativeBody):
    """The body of a request that exchanges an ID token. It may be missing."""

    tenant: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The id or name of the tenant to act in. The default is the only one, if there is one."""


class SeatBody(NativeBody):
    """The body of a request that makes a session of the console act as something else."""

    tenant_id: Id | None
    """The tenant to act in. Null acts as an operator."""


def person_answer(person: Person) -> answers.Person:
    return answers.Person(
        id=person.id,
        issuer=person.issuer,
        subject=person.subject,
        email=person.email,
        status="active" if person.suspended_at is None else "suspended",
        roles=tuple(sorted_texts(person.granted)),
        group_roles=tuple(sorted_texts(person.mapped)),
        created_at=int(person.created_at),
        signed_in_at=person.signed_in_at,
    )


def member_answer(member: Member) -> answers.TenantMember:
    """Shows of a person what other people of the tenant may know."""
    person = member.person
    return answers.TenantMember(
        id=person.id,
        name=person.name,
        role=str(member.role),
        status="active" if person.suspended_at is None else "suspended",
        signed_in_at=person.signed_in_at,
    )


def seat_answer(seat: TenantSeat) -> answers.TenantSeat:
    return answers.TenantSeat(id=seat.tenant_id, name=seat.tenant_name, role=str(seat.role))


def tokens_answer(signed_in: SignedIn) -> answers.PersonTokens:
    return answers.PersonTokens(
        person=person_answer(signed_in.person),
        operator=_token(signed_in.operator),
        tenant=_token(signed_in.tenant),
        tenant_id=None if signed_in.tenant_seat is None else signed_in.tenant_seat.tenant_id,
        tenants=tuple(seat_answer(seat) for seat in signed_in.seats.tenants),
    )


def _token(ticket: ConsoleTicket | None) -> answers.AccessToken | None:
    return None if ticket is None else answers.AccessToken(access_token=ticket.text, expires_at=ticket.until)


async def who_am_i(principal: Principal | AdminPrincipal, resources: PeopleResources) -> answers.WhoAmI:
    """Returns who sends a request, with what else the person may act as."""
    person, seats = None, Seats(None, ())
    if principal.person_id is not None:
        person, seats = await resources.people.seats(principal.person_id)
    in_tenant = principal if isinstance(principal, Principal) else None
    return answers.WhoAmI(
        kind="key" if person is None else "person",
        acts_as="operator" if in_tenant is None else "tenant",
        tenant_id=None if in_tenant is None else in_tenant.tenant_id,
        tenant_name=None if in_tenant is None else in_tenant.tenant_name,
        key_id=None if in_tenant is None else in_tenant.key_id,
        scopes=() if in_tenant is None else tuple(sorted(in_tenant.scopes)),
        may_change=principal.may_change if isinstance(principal, AdminPrincipal) else True,
        person=None if person is None else person_answer(person),
        operator_role=None if seats.operator is None else str(seats.operator),
        tenants=tuple(seat_answer(seat) for seat in seats.tenants),
    )


async def session_fields(principal: Principal | AdminPrincipal, resources: PeopleResources) -> dict[str, Any]:
    """Returns what the console's page shows of the person who has signed in; nothing for a key."""
    if principal.person_id is None:
        return {"person": None, "operator_role": None, "tenants": []}
    shown = (await who_am_i(principal, resources)).body()
    return {"operator_role": shown["operator_role"], "tenants": shown["tenants"]} | {
        "person": {"id": shown["person"]["id"], "name": shown["person"]["email"] or shown["person"]["subject"]}
    }
