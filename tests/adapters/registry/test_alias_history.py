"""Tests of the history of aliases on both databases: what a rollback returns to, and who did what."""

import pytest

from graftwork.adapters.format.specs import AliasTarget
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.pagination import Order, PageRequest
from tests.adapters.registry.two_tenants import TwoTenants

OLDEST_FIRST = PageRequest(limit=100, order=Order.ASCENDING)


@pytest.fixture
async def four_versions(two_tenants: TwoTenants) -> TwoTenants:
    """A tenant with the adapter `bot` in four versions."""
    for seed in range(4):
        await two_tenants.publish(seed=seed)
    return two_tenants


async def promote(two_tenants: TwoTenants, *versions: int) -> None:
    for version in versions:
        await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(version))


async def roll_back(two_tenants: TwoTenants) -> int:
    change = await two_tenants.registry.aliases.roll_back(two_tenants.a, "bot", "prod")
    assert change.target is not None
    return change.target.versions[0]


async def test_a_rollback_returns_to_the_target_before(four_versions: TwoTenants) -> None:
    """A rollback goes to the last target, not to the version below, and further rollbacks go further back."""
    await promote(four_versions, 2, 4, 1, 3)

    assert [await roll_back(four_versions) for _ in range(3)] == [1, 4, 2]
    with pytest.raises(Conflict) as caught:
        await roll_back(four_versions)
    assert caught.value.code == "no_earlier_target"
    assert (await four_versions.registry.get(four_versions.a, "bot")).aliases == {"prod": AliasTarget.to_version(2)}


async def test_a_promotion_after_a_rollback_returns_to_where_the_rollback_led(four_versions: TwoTenants) -> None:
    """After 1, 2, rollback and 3, a rollback leads to 1: the target that was given up does not come back."""
    await promote(four_versions, 1, 2)
    await roll_back(four_versions)
    await promote(four_versions, 3)

    assert await roll_back(four_versions) == 1


async def test_the_same_target_again_is_no_change(four_versions: TwoTenants) -> None:
    """A promotion to the present target adds nothing to the history, so a rollback still changes something."""
    await promote(four_versions, 1, 2, 2, 2)

    assert await roll_back(four_versions) == 1


async def test_a_rollback_restores_a_canary_whole(four_versions: TwoTenants) -> None:
    """A canary comes back with all its weights."""
    canary = AliasTarget.from_json({"weights": {"1": 0.9, "2": 0.1}})
    await four_versions.registry.aliases.set(four_versions.a, "bot", "prod", canary)
    await promote(four_versions, 3)

    change = await four_versions.registry.aliases.roll_back(four_versions.a, "bot", "prod")

    assert (change.target, change.previous) == (canary, AliasTarget.to_version(3))


async def test_a_rollback_passes_over_deleted_versions(four_versions: TwoTenants) -> None:
    """A target with a version that was deleted is passed over."""
    await promote(four_versions, 1, 2, 3)
    await four_versions.registry.deletions.delete_version(four_versions.a, "bot", 2)

    assert await roll_back(four_versions) == 1


async def test_an_alias_that_was_removed_has_its_past(four_versions: TwoTenants) -> None:
    """An alias that was removed cannot be rolled back; set again, it returns to what it led to before the removal."""
    aliases = four_versions.registry.aliases
    await promote(four_versions, 1, 2)
    await aliases.remove(four_versions.a, "bot", "prod")
    with pytest.raises(NotFound):
        await roll_back(four_versions)
    await promote(four_versions, 3)

    assert await roll_back(four_versions) == 2


async def test_the_history_tells_who_set_what_when(four_versions: TwoTenants) -> None:
    """Each change is in the history with its target, reason, actor and time, and in pages by number."""
    aliases, a, clock = four_versions.registry.aliases, four_versions.a, four_versions.clock
    start = clock.now()
    await aliases.set(a, "bot", "prod", AliasTarget.to_version(1), actor="key_1")
    clock.advance(5)
    await aliases.set(a, "bot", "prod", AliasTarget.to_version(2), actor="key_2")
    await aliases.roll_back(a, "bot", "prod", actor="key_3")
    await aliases.remove(a, "bot", "prod", actor="key_4")

    events = (await aliases.history(a, "bot", "prod", OLDEST_FIRST)).items
    newest = await aliases.history(a, "bot", "prod", PageRequest(limit=3))
    rest = await aliases.history(a, "bot", "prod", PageRequest(limit=3, after=newest.items[-1].id))

    versions = [event.target.versions if event.target else None for event in events]
    assert versions == [(1,), (2,), (1,), None]
    assert [(event.reason, event.actor, event.at - start) for event in events] == [
        ("set", "key_1", 0),
        ("set", "key_2", 5),
        ("rollback", "key_3", 5),
        ("removed", "key_4", 5),
    ]
    assert [event.number for event in (*newest.items, *rest.items)] == [4, 3, 2, 1]
    assert (newest.has_more, rest.has_more) == (True, False)


async def test_a_history_is_the_tenants_own(four_versions: TwoTenants) -> None:
    """Another tenant's history, an unknown alias and a wrong cursor are refused."""
    aliases = four_versions.registry.aliases
    await promote(four_versions, 1)

    for scope, name, alias in (
        (four_versions.b, "bot", "prod"),
        (four_versions.a, "bot", "beta"),
        (four_versions.a, "no", "prod"),
    ):
        with pytest.raises(NotFound):
            await aliases.history(scope, name, alias, OLDEST_FIRST)
        with pytest.raises(NotFound):
            await aliases.roll_back(scope, name, alias)
    for after in ("adp_1", "", "-1", "\u0663"):
        with pytest.raises(ValidationFailed):
            await aliases.history(four_versions.a, "bot", "prod", PageRequest(after=after))


async def test_every_act_is_in_the_audit_log(with_grace: TwoTenants) -> None:
    """Uploads, promotions, canaries, rollbacks, deletions and restores are in the audit log, and refused acts are not."""
    registry, a = with_grace.registry, with_grace.a
    digest = (await with_grace.publish(seed=0)).versions[0].digest
    await with_grace.publish(seed=0)  # changes nothing
    await with_grace.publish(seed=1)
    await registry.aliases.set(a, "bot", "prod", AliasTarget.to_version(1), actor="key_1")
    await registry.aliases.set(a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 9, "2": 1}}), actor="key_1")
    await registry.aliases.roll_back(a, "bot", "prod", actor="key_1")
    with pytest.raises(NotFound):
        await registry.aliases.set(a, "bot", "prod", AliasTarget.to_version(9), actor="key_1")
    await registry.aliases.remove(a, "bot", "prod", actor="key_1")
    await registry.deletions.delete_version(a, "bot", 2, actor="key_1")
    await registry.deletions.restore_version(a, "bot", 2, actor="key_1")
    await registry.deletions.delete(a, "bot", actor="key_2")
    await registry.deletions.restore(a, "bot", actor="key_2")
    await registry.deletions.delete(a, "bot", erase=True, actor="key_2")

    entries = await with_grace.audited()

    assert [(actor, action.removeprefix("adapter."), target) for actor, action, target, _ in entries] == [
        ("admin", "uploaded", "bot@1"),
        ("admin", "uploaded", "bot@2"),
        ("key_1", "alias.set", "bot@prod"),
        ("key_1", "alias.set", "bot@prod"),
        ("key_1", "alias.rollback", "bot@prod"),
        ("key_1", "alias.removed", "bot@prod"),
        ("key_1", "version.deleted", "bot@2"),
        ("key_1", "version.restored", "bot@2"),
        ("key_2", "deleted", "bot"),
        ("key_2", "restored", "bot"),
        ("key_2", "erased", "bot"),
    ]
    assert entries[0][3]["digest"] == digest
    assert entries[3][3] == {"target": {"weights": {"1": 9.0, "2": 1.0}}, "previous": {"version": 1}}
