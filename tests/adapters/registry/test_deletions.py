"""Tests of deletions with grace on both databases: what is restored, what is erased, and when."""

import asyncio

import pytest

from graftwork.adapters.format.specs import AliasTarget
from graftwork.adapters.inspection.upload import Push
from graftwork.platform.errors import BudgetSpent, Conflict, NotFound
from graftwork.platform.quotas.quota import Quota
from tests.adapters.registry.two_tenants import SOMEONE, TwoTenants


async def test_a_deleted_adapter_comes_back_whole(with_grace: TwoTenants) -> None:
    """A deleted adapter is gone for requests and lists; restored, it has its versions and aliases."""
    registry, a = with_grace.registry, with_grace.a
    await with_grace.publish(seed=0)
    await with_grace.publish(seed=1)
    await registry.aliases.set(a, "bot", "prod", AliasTarget.to_version(1))
    before = await registry.get(a, "bot")

    freed = await registry.deletions.delete(a, "bot")
    listed = (await registry.list(a)).items
    names = await registry.model_names(a)
    with pytest.raises(NotFound):
        await registry.get(a, "bot")
    for model in ("bot", "bot@1", "bot@prod"):
        with pytest.raises(NotFound):
            await registry.resolve(a, model, "tiny", SOMEONE)
    restored = await registry.deletions.restore(a, "bot")

    assert (freed, listed, names, len(with_grace.stored)) == ((), (), (), 2)
    assert restored == before == await registry.get(a, "bot")


async def test_a_deleted_version_is_not_ready(with_grace: TwoTenants) -> None:
    """A deleted version answers nobody, no alias can lead to it, and it serves again once it is restored."""
    registry, a = with_grace.registry, with_grace.a
    await with_grace.publish(seed=0)
    await with_grace.publish(seed=1)
    await registry.deletions.delete_version(a, "bot", 2)

    assert [each.version for each in (await registry.get(a, "bot")).deleted_versions] == [2]
    assert (await registry.resolve(a, "bot", "tiny", SOMEONE)).label == "bot@1"
    with pytest.raises(NotFound):
        await registry.resolve(a, "bot@2", "tiny", SOMEONE)
    for target in ({"version": 2}, {"weights": {"1": 1, "2": 1}}):
        with pytest.raises(Conflict) as caught:
            await registry.aliases.set(a, "bot", "prod", AliasTarget.from_json(target))
        assert caught.value.code == "version_not_ready"
    await registry.deletions.restore_version(a, "bot", 2)

    assert (await registry.resolve(a, "bot", "tiny", SOMEONE)).label == "bot@2"


async def test_the_sweep_erases_what_is_too_old(with_grace: TwoTenants) -> None:
    """What was deleted is erased after the grace, with its files, and not a moment before."""
    registry, a, clock = with_grace.registry, with_grace.a, with_grace.clock
    for name, seed in (("old", 0), ("bot", 1), ("bot", 2), ("late", 3)):
        await with_grace.publish(name, seed=seed)
    await registry.deletions.delete(a, "old")
    await registry.deletions.delete_version(a, "bot", 1)
    clock.advance(60)
    await registry.deletions.delete(a, "late")
    clock.advance(40)

    assert await registry.deletions.sweep() == 0
    clock.advance(1)
    assert await registry.deletions.sweep() == 2

    assert len(with_grace.stored) == 2
    with pytest.raises(NotFound):
        await registry.deletions.restore(a, "old")
    with pytest.raises(NotFound):
        await registry.deletions.restore_version(a, "bot", 1)
    await registry.deletions.restore(a, "late")
    assert [entry[:3] for entry in await with_grace.audited() if entry[0] == "sweep"] == [
        ("sweep", "adapter.erased", "old"),
        ("sweep", "adapter.version.erased", "bot@1"),
    ]


async def test_a_restored_adapter_is_safe_from_the_sweep(with_grace: TwoTenants) -> None:
    """What was restored in time stays, however late the sweep comes."""
    registry, a = with_grace.registry, with_grace.a
    await with_grace.publish()
    await registry.deletions.delete(a, "bot")
    await registry.deletions.restore(a, "bot")
    with_grace.clock.advance(1e6)

    assert await registry.deletions.sweep() == 0
    assert (await registry.get(a, "bot")).versions


async def test_a_name_is_taken_until_it_is_erased(with_grace: TwoTenants) -> None:
    """A push to a deleted name is a conflict; once the adapter is erased, the name begins anew."""
    await with_grace.publish(seed=0)
    await with_grace.registry.deletions.delete(with_grace.a, "bot")

    with pytest.raises(Conflict) as caught:
        await with_grace.publish(seed=1)
    await with_grace.registry.deletions.delete(with_grace.a, "bot", erase=True)
    again = await with_grace.publish(seed=1)

    assert caught.value.code == "adapter_deleted"
    assert [version.version for version in again.versions] == [1]
    with pytest.raises(NotFound):
        await with_grace.registry.deletions.restore(with_grace.a, "bot")


async def test_the_same_files_restore_their_version(with_grace: TwoTenants) -> None:
    """A push of files whose version was deleted restores that version."""
    await with_grace.publish(seed=0)
    await with_grace.publish(seed=1)
    await with_grace.registry.deletions.delete_version(with_grace.a, "bot", 1)

    again = await with_grace.publish(seed=0)

    assert ([version.version for version in again.versions], again.deleted_versions) == ([1, 2], ())


async def test_what_can_be_restored_counts_in_the_limits(with_grace: TwoTenants) -> None:
    """A deleted adapter counts in the limits until it is erased, so that a restore can never exceed them."""
    limits = Quota(max_adapters=1)
    await with_grace.publish("one", seed=0, limits=limits)
    await with_grace.registry.deletions.delete(with_grace.a, "one")

    with pytest.raises(BudgetSpent):
        await with_grace.publish("two", seed=1, limits=limits)
    await with_grace.registry.deletions.delete(with_grace.a, "one", erase=True)
    await with_grace.publish("two", seed=1, limits=limits)


async def test_another_tenant_restores_nothing(with_grace: TwoTenants) -> None:
    """A tenant cannot restore or erase what another has deleted."""
    await with_grace.publish()
    deletions, b = with_grace.registry.deletions, with_grace.b
    await deletions.delete(with_grace.a, "bot")

    for act in (deletions.restore(b, "bot"), deletions.delete(b, "bot", erase=True), deletions.restore(b, "none")):
        with pytest.raises(NotFound):
            await act
    await deletions.restore(with_grace.a, "bot")


async def test_a_held_version_is_not_the_plain_name(two_tenants: TwoTenants) -> None:
    """A plain name passes over versions that were pushed without being promoted; version and alias find them."""
    registry, a, held = two_tenants.registry, two_tenants.a, Push(is_held=True)
    await two_tenants.publish("first", seed=0, push=held)
    await two_tenants.publish("bot", seed=1)
    await two_tenants.publish("bot", seed=2, push=held)

    with pytest.raises(NotFound):
        await registry.resolve(a, "first", "tiny", SOMEONE)
    assert (await registry.resolve(a, "bot", "tiny", SOMEONE)).label == "bot@1"
    assert (await registry.resolve(a, "bot@2", "tiny", SOMEONE)).label == "bot@2"
    await registry.aliases.set(a, "bot", "prod", AliasTarget.to_version(2))
    assert (await registry.resolve(a, "bot", "tiny", SOMEONE)).label == "bot@2"


@pytest.mark.parametrize("exists", [False, True])
async def test_of_two_uploads_of_one_name_one_wins(two_tenants: TwoTenants, exists: bool) -> None:
    """Two different uploads of one name at one time: one makes a version, the other is a conflict and leaves no file."""
    num_stored = 0
    for name in ("bot", "bot-2", "bot-3", "bot-4"):
        if exists:
            await two_tenants.publish(name, seed=0)

        results = await asyncio.gather(
            two_tenants.publish(name, seed=1),
            two_tenants.publish(name, seed=2),
            two_tenants.publish(f"other-{name}", seed=3),
            return_exceptions=True,
        )

        num_stored = len(two_tenants.stored)
        conflicts = [result for result in results if isinstance(result, Conflict)]
        if conflicts:
            break  # else one ended before the other began

    assert [error.code for error in conflicts] == ["concurrent_upload"]
    assert not isinstance(results[2], BaseException)
    adapter = await two_tenants.registry.get(two_tenants.a, name)
    assert [version.version for version in adapter.versions] == ([1, 2] if exists else [1])
    num_earlier = 0 if name == "bot" else 1  # the files of both uploads, which one name before has stored
    assert num_stored == 2 + exists + num_earlier


async def test_two_uploads_of_the_same_files_both_succeed(two_tenants: TwoTenants) -> None:
    """Two uploads of equal files to one name at one time make one version, which both get."""
    first, second = await asyncio.gather(two_tenants.publish(seed=1), two_tenants.publish(seed=1))

    assert [version.version for version in first.versions] == [version.version for version in second.versions] == [1]
