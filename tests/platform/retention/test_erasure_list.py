"""Tests that erasures are done again after an older backup was restored."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest, NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.retention.erasure_list import AppliedErasures, ErasureList
from graftwork.platform.tenancy.erasure import SETTLE_S, TenantErasure
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.tenancy import Tenancy

HEAD = '{"format": "graftwork-erasures-1", "at": 0}\n'


class Server:
    """One database, and the erasure that a server on it does."""

    def __init__(self, database: Database, clock: ManualClock) -> None:
        self.tenancy = Tenancy(database, b"pepper", clock)
        self.list = ErasureList(database, clock)
        self.erased: list[TenantId] = []
        self.clock = clock
        self.erasure = TenantErasure(database, clock, {"everything": self._erase})

    async def _erase(self, scope: TenantScope) -> bool:
        self.erased.append(scope)
        return True

    async def sweep(self) -> None:
        self.clock.advance(SETTLE_S)
        await self.erasure.sweep()

    async def lines(self) -> list[str]:
        return [line async for line in self.list.lines()]


@pytest.fixture
def server(database: Database, manual_clock: ManualClock) -> Server:
    return Server(database, manual_clock)


async def test_a_tenant_that_a_backup_brought_back_is_deleted_and_erased(server: Server) -> None:
    """A tenant of the list that lives in the restored database loses its access and is erased; another one is untouched."""
    gone, living = await server.tenancy.create_tenant("gone"), await server.tenancy.create_tenant("living")
    line = f'{{"tenant_id": "{gone.id}", "deleted_at": 1.0, "erased_at": 2.0}}\n'

    applied = await server.list.apply([HEAD, line, line.replace(gone.id, "ten_later")])
    await server.sweep()

    assert applied == AppliedErasures(deleted=1, again=0, unknown=1)
    assert server.erased == [gone.id]
    assert (await server.erasure.get(gone.id)).erased_at == server.clock.now()
    with pytest.raises(NotFound):
        await server.tenancy.get_tenant(gone.id)
    assert (await server.tenancy.get_tenant(living.id)).name == "living"
    actors = {entry.actor for entry in (await server.tenancy.audit()).items if entry.action == "tenant.deleted"}
    assert actors == {"erasures apply"}


async def test_a_list_of_a_database_erases_again_what_is_erased(server: Server) -> None:
    """Its own list makes a server erase all of its deleted tenants once more, such as after an older data folder was
    restored; and a second time as well.
    """
    tenants = [await server.tenancy.create_tenant(name) for name in ("a", "b", "c")]
    for tenant in tenants[:2]:
        await server.tenancy.delete_tenant(tenant.id)
    await server.sweep()
    assert sorted(server.erased) == sorted(tenant.id for tenant in tenants[:2])

    for _ in range(2):
        server.erased.clear()
        applied = await server.list.apply(await server.lines())
        await server.sweep()

        assert applied == AppliedErasures(deleted=0, again=2, unknown=0)
        assert sorted(server.erased) == sorted(tenant.id for tenant in tenants[:2])


async def test_the_list_has_no_names(server: Server) -> None:
    """A line of the list has the tenant's id and times, and neither its name nor anything else."""
    tenant = await server.tenancy.create_tenant("a name to be forgotten")
    await server.tenancy.delete_tenant(tenant.id)

    head, line = await server.lines()

    assert line == f'{{"tenant_id": "{tenant.id}", "deleted_at": {server.clock.now()}, "erased_at": null}}\n'
    assert "forgotten" not in head + line


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([], "Line 1"),
        (['{"tenant_id": "ten_1"}\n'], "Line 1"),
        ([HEAD, "ten_1\n"], "Line 2"),
        ([HEAD, "[]\n"], "Line 2"),
        ([HEAD, '{"tenant_id": "LIVING"}\n', "{}\n"], "Line 3"),
    ],
)
async def test_a_wrong_file_changes_nothing(server: Server, lines: list[str], wrong: str) -> None:
    """A file that is no list is refused with its line, before any tenant is deleted."""
    living = await server.tenancy.create_tenant("living")

    with pytest.raises(InvalidRequest, match=wrong):
        await server.list.apply([line.replace("LIVING", living.id) for line in lines])

    assert (await server.tenancy.get_tenant(living.id)).name == "living"
