"""Tests of the switches of traces in the database, on SQLite and on PostgreSQL."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.modes.trace_switches import MAX_SWITCHES, TraceSwitchboard
from graftwork.platform.pagination import FIRST_PAGE
from graftwork.platform.tenancy import repository
from graftwork.platform.tracing.trace_rules import Switches


def board(database: Database) -> tuple[TraceSwitchboard, Switches]:
    switches = Switches()
    return TraceSwitchboard(database, ManualClock(), switches), switches


async def test_another_gateway_follows_at_its_next_refresh(database: Database) -> None:
    """What one gateway switches, it applies at once, and another one after it has read the database."""
    (one, own), (other, others) = board(database), board(database)
    await one.set("ses_1", token_ids=True)
    await one.set("ses_2", token_ids=False)

    assert own.traced == {"ses_1", "ses_2"}
    assert not others.traced
    await other.refresh()
    assert (others.traced, others.token_logged) == ({"ses_1", "ses_2"}, {"ses_1"})

    await other.clear("ses_1")
    await one.refresh()
    assert (own.traced, own.token_logged) == ({"ses_2"}, set())


async def test_a_second_switch_replaces_the_first(database: Database) -> None:
    """To switch on again without token ids ends their log, and leaves one row."""
    one, own = board(database)
    await one.set("ses_1", token_ids=True)
    await one.set("ses_1", token_ids=False)

    assert len(await one.refresh()) == 1
    assert own.token_logged == set()


@pytest.mark.parametrize("target", ["", "acme", "req_1", "ses_" + "x" * 80, "ses_\u202e"])
async def test_only_tenants_and_sessions_are_switched(database: Database, target: str) -> None:
    """Another id is refused and stored nowhere."""
    one, _ = board(database)
    with pytest.raises(ValidationFailed):
        await one.set(target, token_ids=False)

    assert await one.refresh() == ()


async def test_an_unknown_tenant_is_refused(database: Database) -> None:
    """A typing error in a tenant's id is a 404, and not a trace of nobody."""
    one, _ = board(database)
    with pytest.raises(NotFound):
        await one.set("ten_nobody", token_ids=False)
    with pytest.raises(NotFound):
        await one.clear("ten_nobody")


async def test_the_switches_are_bounded(database: Database) -> None:
    """One more than so many is refused; one of those that are on may still change."""
    one, _ = board(database)
    for number in range(MAX_SWITCHES):
        await one.set(f"ses_{number}", token_ids=False)

    with pytest.raises(Conflict):
        await one.set("ses_more", token_ids=False)
    await one.set("ses_0", token_ids=True)


async def test_changes_are_in_the_audit_log(database: Database) -> None:
    """The entries name the operator, the session and whether token ids were logged."""
    one, _ = board(database)
    await one.set("ses_1", token_ids=True, actor="night shift")
    await one.clear("ses_1", actor="day shift")

    async with database.read() as session:
        entries = (await repository.list_audit_entries(session, FIRST_PAGE)).items

    assert {(entry.actor, entry.action, entry.target) for entry in entries} == {
        ("night shift", "trace.on", "ses_1"),
        ("day shift", "trace.off", "ses_1"),
    }
