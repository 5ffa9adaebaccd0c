"""Tests of the degraded modes in the database, on SQLite and on PostgreSQL."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable, ValidationFailed
from graftwork.platform.modes.modes import DegradedModes, ModeSwitch
from graftwork.platform.pagination import FIRST_PAGE
from graftwork.platform.tenancy import repository


async def test_another_gateway_follows_at_its_next_refresh(database: Database) -> None:
    """What one gateway sets, another one has after it has read the database; before, it takes nothing away."""
    clock = ManualClock()
    one, other = ModeSwitch(database, clock), ModeSwitch(database, clock)
    assert await other.refresh() == DegradedModes()

    await one.set(DegradedModes(max_output_tokens=7, suspend_drafts=True))
    assert other.current == DegradedModes()
    await other.refresh()

    assert other.current == one.current == DegradedModes(7, suspend_drafts=True, changed_at=clock.now())


async def test_a_second_change_replaces_all_modes(database: Database) -> None:
    """A mode that is left out of a change is off after it."""
    switch = ModeSwitch(database, ManualClock())
    await switch.set(DegradedModes(max_output_tokens=7))
    await switch.set(DegradedModes(refuse_flex=True))

    read = await ModeSwitch(database, ManualClock()).refresh()

    assert (read.max_output_tokens, read.suspend_drafts, read.refuse_flex) == (None, False, True)


async def test_changes_are_in_the_audit_log(database: Database) -> None:
    """The entry names the operator and the new modes."""
    await ModeSwitch(database, ManualClock()).set(DegradedModes(refuse_flex=True), actor="night shift")

    async with database.read() as session:
        (entry,) = (await repository.list_audit_entries(session, FIRST_PAGE)).items

    assert (entry.actor, entry.action) == ("night shift", "modes.set")
    assert entry.details == {"max_output_tokens": None, "suspend_drafts": False, "refuse_flex": True}


async def test_a_limit_below_one_is_refused(database: Database) -> None:
    """A limit of 0 tokens is refused and changes nothing."""
    switch = ModeSwitch(database, ManualClock())
    with pytest.raises(ValidationFailed, match="at least 1"):
        await switch.set(DegradedModes(max_output_tokens=0))

    assert await switch.refresh() == DegradedModes()


def test_only_flex_is_refused() -> None:
    """With `refuse_flex`, the error for flex says when to retry, and other tiers are served."""
    modes = DegradedModes(refuse_flex=True)
    modes.check_tier("default")
    modes.check_tier("priority")
    DegradedModes().check_tier("flex")

    with pytest.raises(Unavailable, match="flex") as refused:
        modes.check_tier("flex")

    assert refused.value.code == "tier_suspended"
    assert refused.value.retry_after_s is not None
