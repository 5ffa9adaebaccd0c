"""Tests of engines that come back after a tenant was deleted. The engines are scripted, the database is real."""

from collections.abc import AsyncIterator

import pytest

from graftwork.api.server.erasing import TOLD_FOR_S, LateErasure
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.principals import isolation_of
from graftwork.platform.tenancy.tenancy import Tenancy
from tests.engine.fleet.test_client import NAMES, Fleet

PEPPER = b"a pepper for tests"


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    """Three engines that are ready."""
    fleet = Fleet(manual_clock)
    await fleet.client.describe()
    yield fleet
    await fleet.client.close()


@pytest.fixture
def late(fleet: Fleet, database: Database, manual_clock: ManualClock) -> LateErasure:
    return LateErasure(TenantErasure(database, manual_clock, {}), fleet.client, PEPPER)


async def comes_back(fleet: Fleet, name: str) -> None:
    """Lets a gateway lose an engine, and find it again."""
    fleet.client.membership.note_lost(fleet.client.membership.members[name], "gone")
    fleet.engines[name].is_absent = False
    await fleet.until(lambda: name in [one.replica_id for one in fleet.client.membership.ready])


async def test_an_engine_that_comes_back_forgets_who_was_deleted_meanwhile(
    fleet: Fleet, late: LateErasure, database: Database, manual_clock: ManualClock
) -> None:
    """All engines are told of a deleted tenant once, and one that was away is told again; a living tenant is not named."""
    tenancy = Tenancy(database, PEPPER, manual_clock)
    deleted, _ = await tenancy.create_tenant("deleted"), await tenancy.create_tenant("living")
    await tenancy.delete_tenant(deleted.id)
    domain = isolation_of(deleted.id, PEPPER).hex()

    await late.sweep()
    await late.sweep()
    assert {name: fleet.engines[name].forgotten for name in NAMES} == {name: [domain] for name in NAMES}
    await comes_back(fleet, "b")
    await late.sweep()

    assert fleet.engines["b"].forgotten == [domain, domain]
    assert fleet.engines["a"].forgotten == [domain]
    manual_clock.advance(TOLD_FOR_S + 1)
    await comes_back(fleet, "b")
    await late.sweep()
    assert len(fleet.engines["b"].forgotten) == 2


async def test_an_engine_that_does_not_answer_is_told_later(
    fleet: Fleet, late: LateErasure, database: Database, manual_clock: ManualClock
) -> None:
    """If an engine is lost while it is told, the next sweep tells it, and the others are told all the same."""
    tenancy = Tenancy(database, PEPPER, manual_clock)
    await tenancy.delete_tenant((await tenancy.create_tenant("deleted")).id)
    fleet.engines["a"].is_absent = True

    await late.sweep()
    assert [len(fleet.engines[name].forgotten) for name in NAMES] == [0, 1, 1]
    fleet.engines["a"].is_absent = False
    await fleet.until(lambda: len(fleet.client.membership.ready) == len(NAMES))
    await late.sweep()

    assert [len(fleet.engines[name].forgotten) for name in NAMES] == [1, 1, 1]
