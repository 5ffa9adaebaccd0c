"""Defines people: who they are at the identity provider, what they may do, and as what they can act."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from graftwork.platform.ids import PersonId, TenantId
from graftwork.platform.people.roles import Grant, Role

_PREFIX = "per_"


@dataclass(frozen=True, slots=True)
class Identity:
    """What an identity provider has said of a person who has just signed in."""

    issuer: str
    subject: str
    """The person's id at this issuer. It never changes; the e-mail address may."""
    email: str | None = None
    """None if the provider gave none, or says that it is not verified."""
    groups: tuple[str, ...] = ()
    ends_at: float | None = None
    """The time at which the provider wants the session to end, in unix seconds. None if it does not say."""

    @property
    def name(self) -> str:
        """Whose request it is, where requests of different senders are told apart."""
        return self.subject


@dataclass(frozen=True, slots=True)
class Person:
    """A person, as the server stores them. Times are in unix seconds."""

    id: PersonId
    issuer: str
    subject: str
    email: str | None
    groups: tuple[str, ...]
    """The person's groups at the provider to which the settings give roles, as of the last sign-in."""
    operator_role: Role | None
    """The operator's role that the person has now, by grants and groups. None while suspended."""
    created_at: float
    signed_in_at: float | None
    suspended_at: float | None
    operator_hash: bytes | None = field(default=None, repr=False)
    """A random text of the server under which the person's tickets as an operator are sealed."""
    granted: tuple[Grant, ...] = ()
    """The roles that were granted one by one."""
    mapped: tuple[Grant, ...] = ()
    """The roles by the person's groups."""

    @property
    def name(self) -> str:
        """What people call the person: the e-mail address, or else the id at the provider."""
        return self.email or self.subject

    @property
    def grants(self) -> frozenset[Grant]:
        """All roles, also while the person is suspended."""
        return frozenset({*self.granted, *self.mapped})

    @property
    def effective(self) -> frozenset[Grant]:
        """The roles that hold now: none while the person is suspended."""
        return self.grants if self.suspended_at is None else frozenset()

    @property
    def public_id(self) -> str:
        """The id without its prefix, as tickets have it."""
        return self.id.removeprefix(_PREFIX)


def person_id_of(public_id: str) -> PersonId:
    """Returns the id of the person of a ticket."""
    return PersonId(f"{_PREFIX}{public_id}")


@dataclass(frozen=True, slots=True)
class Member:
    """A person of a tenant, with the strongest role there. Who is suspended has it again afterwards."""

    person: Person
    role: Role


@dataclass(frozen=True, slots=True)
class TenantSeat:
    """A tenant in which a person may act, and with which role."""

    tenant_id: TenantId
    tenant_name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Seats:
    """As what a person may act now."""

    operator: Role | None
    tenants: Sequence[TenantSeat]

    def tenant(self, wanted: str | None) -> TenantSeat | None:
        """Returns the seat in the tenant of this id or name, or None. None for `wanted` is the only tenant, if there is one."""
        if wanted is None:
            return self.tenants[0] if len(self.tenants) == 1 else None
        by_id = [seat for seat in self.tenants if seat.tenant_id == wanted]
        by_name = [seat for seat in self.tenants if seat.tenant_name == wanted]
        found = by_id or by_name
        return found[0] if len(found) == 1 else None
