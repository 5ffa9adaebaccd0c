"""Keeps what people act with in step with their roles: a key in each tenant, and the hash of an operator's tickets.

A person acts in a tenant with an API key of their own, whose text nobody has: tickets of the console and of the command
line are sealed under its stored hash (`platform/keys/console_tickets.py`). So scopes, limits, usage, running work and
revocation are those of keys. Such a key is a seat:

    open      the person has a role in the tenant; the seat's scopes are those of the role
    closed    `revoked_at` is set: the role is gone, or the person is suspended
    opened again    with a new hash, so that no ticket from before is valid

Owns the rows of seats, and never decides who has which role.
Invariant: at the end of each transaction that changes roles, no seat allows more than its person's roles.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import KeyId, TenantId, new_id
from graftwork.platform.people import repository as rows
from graftwork.platform.people.person import Person, Seats, TenantSeat
from graftwork.platform.people.roles import SCOPES_OF, operator_role, role_in
from graftwork.platform.tenancy import key_rows, repository
from graftwork.platform.tenancy.tenants import ApiKey

_HASH_BYTES = 32
_MOST_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Settled:
    """What `settle` has changed."""

    person: Person
    closed: tuple[KeyId, ...] = ()
    """The seats that have ended."""
    has_changed: bool = False
    """Whether anything has changed that other gateways must hear of."""


async def seats_of(session: ReadSession, person: Person) -> Seats:
    """Returns as what a person may act now: no deleted or suspended tenant is among them."""
    grants = person.effective
    places = {grant.on for grant in grants if grant.on}
    found = []
    for tenant in await rows.tenants_on(session, places) if places else ():
        role = role_in(grants, tenant)
        if role is not None:
            found.append(TenantSeat(tenant.id, tenant.name, role))
    return Seats(operator_role(grants), tuple(found))


async def settle(session: WriteSession, person: Person, now: float) -> Settled:
    """Makes all that a person acts with fit the roles that hold now. The person's row is locked."""
    changes = _operator_changes(person)
    if changes:
        await rows.change_person(session, person.id, changes)
    has_changed, closed = bool(changes), []
    for seat in await key_rows.list_person_keys(session, person.id):
        if seat.revoked_at is not None:
            continue
        wanted = await _scopes(session, person, seat.tenant_id)
        if not wanted:
            await key_rows.change_key(session, seat.tenant_id, seat.id, {"revoked_at": now})
            closed.append(seat.id)
        elif wanted != seat.scopes or seat.name != _name(person):
            fitting = {"scopes": sorted(wanted), "name": _name(person)}
            await key_rows.change_key(session, seat.tenant_id, seat.id, fitting)
        has_changed |= wanted != seat.scopes
    return Settled(person, tuple(closed), has_changed)


async def take_seat(session: WriteSession, person: Person, tenant_id: TenantId, now: float) -> ApiKey:
    """Returns the open seat of a person in a tenant; makes it or opens it again. The person's row is locked.

    Raises NotPermitted if the person has no role in the tenant, and for an unknown tenant alike.
    """
    tenant = await repository.hold_tenant(session, tenant_id)
    scopes = frozenset() if tenant is None else await _scopes(session, person, tenant_id)
    if not scopes:
        raise NotPermitted(f"You have no role in the tenant {tenant_id!r}; ask the operator for one.", code="no_role")
    seat = await key_rows.find_person_key(session, person.id, tenant_id)
    if seat is None:
        await key_rows.add_key(session, _new_seat(person, tenant_id, scopes, now))
    elif seat.revoked_at is not None:
        opened = {
            "revoked_at": None,
            "key_hash": secrets.token_bytes(_HASH_BYTES),
            "scopes": sorted(scopes),
            "name": _name(person),
        }
        await key_rows.change_key(session, tenant_id, seat.id, opened)
    taken = await key_rows.find_person_key(session, person.id, tenant_id)
    assert taken is not None
    return taken


def _operator_changes(person: Person) -> dict[str, Any]:
    """Returns the columns to change so that the person's row has the operator's role that holds now."""
    wanted = operator_role(person.effective)
    if wanted == person.operator_role:
        return {}
    if wanted is None:
        return {"operator_role": None, "operator_hash": None}
    return {"operator_role": str(wanted), "operator_hash": person.operator_hash or secrets.token_bytes(_HASH_BYTES)}


async def _scopes(session: ReadSession, person: Person, tenant_id: TenantId) -> frozenset[str]:
    tenant = await repository.find_tenant(session, tenant_id)
    role = None if tenant is None else role_in(person.effective, tenant)
    return frozenset() if role is None else SCOPES_OF[role]


def _name(person: Person) -> str:
    return person.name[:_MOST_NAME_CHARACTERS]


def _new_seat(person: Person, tenant_id: TenantId, scopes: frozenset[str], now: float) -> ApiKey:
    return ApiKey(
        id=KeyId(new_id("key")),
        tenant_id=tenant_id,
        name=_name(person),
        public_id=secrets.token_hex(16),
        scopes=scopes,
        adapters=None,
        allowed_ips=None,
        created_at=now,
        expires_at=None,
        revoked_at=None,
        last_used_at=None,
        replaced_by=None,
        key_hash=secrets.token_bytes(_HASH_BYTES),
        person_id=person.id,
    )
