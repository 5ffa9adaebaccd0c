"""Tests of who the members of a tenant are, on both databases, against a count over all people."""

from random import Random

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import PersonId, TenantId
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.people.roles import Role, parse_grant
from tests.platform.people.test_people import ISSUER, Office

RANK = ("tenant-admin", "tenant-member", "tenant-viewer")


async def all_members(office: Office, tenant_id: TenantId, order: Order, limit: int) -> list[tuple[PersonId, Role]]:
    """The members in pages of `limit`, one after another."""
    found: list[tuple[PersonId, Role]] = []
    after: str | None = None
    while True:
        page = await office.people.members(tenant_id, PageRequest(limit, after, order))
        found += [(member.person.id, member.role) for member in page.items]
        if not page.has_more:
            return found
        after = page.items[-1].person.id


@pytest.mark.parametrize("seed", range(3))
async def test_members_are_those_with_a_role_in_the_tenant(
    database: Database, manual_clock: ManualClock, seed: int
) -> None:
    """Whatever is granted to people and groups, on tenants and organisations: the members are those to whom the grants
    on the tenant or its organisation give a role, each once, with the strongest.
    """
    random, setup = Random(seed), Office(database, manual_clock)
    organisation = (await setup.tenancy.organisations.create("Group")).id
    tenants = [(await setup.tenancy.create_tenant(name)).id for name in ("one", "two")]
    await setup.tenancy.organisations.add_tenant(organisation, tenants[0])
    places = [*tenants, organisation]
    texts = ["operator", *(f"{role}:{place}" for role in RANK for place in places)]
    groups = {f"group-{number}": random.choice(texts[1:]) for number in range(4)}
    office = Office(database, manual_clock, groups)
    held: dict[PersonId, list[str]] = {}
    for number in range(15):
        granted, in_groups = random.sample(texts, random.randrange(3)), random.sample([*groups], random.randrange(3))
        subject = f"person-{number}"
        person = await office.people.add(ISSUER, subject, None)
        for text in granted:
            await office.people.grant(person.id, parse_grant(text))
        held[person.id] = [*granted, *(groups[group] for group in in_groups)]
        if any(text != "operator" for text in held[person.id]):
            await office.exchange(subject, held_tenant(held[person.id], tenants), *in_groups)

    for tenant_id in tenants:
        here = (tenant_id, organisation) if tenant_id == tenants[0] else (tenant_id,)
        expected = []
        for person_id, roles in sorted(held.items()):
            strongest = [role for role in RANK if any(f"{role}:{place}" in roles for place in here)]
            expected += [(person_id, Role(strongest[0]))] if strongest else []

        assert await all_members(office, tenant_id, Order.ASCENDING, 3) == expected
        assert await all_members(office, tenant_id, Order.DESCENDING, 4) == expected[::-1]


def held_tenant(roles: list[str], tenants: list[TenantId]) -> str:
    """A tenant in which one of the roles holds; an organisation's roles hold in the first one."""
    on = [text.partition(":")[2] for text in roles if ":" in text]
    return next((place for place in on if place in tenants), tenants[0])


async def test_an_unknown_tenant_has_no_members(database: Database, manual_clock: ManualClock) -> None:
    """The members of an unknown tenant are an error, and not an empty list."""
    with pytest.raises(NotFound):
        await Office(database, manual_clock).people.members(TenantId("ten_nobody"))
