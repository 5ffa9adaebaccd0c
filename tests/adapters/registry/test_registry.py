"""Tests of the registry on both databases: versions, deletion, lists, and isolation of tenants."""

from collections.abc import Callable
from typing import Any

import pytest

from graftwork.adapters.format.specs import AliasTarget
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.platform.errors import (
    GraftworkError,
    NotFound,
)
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.quotas.quota import Quota
from tests.adapters.adapter_files import DESCRIPTION
from tests.adapters.registry.two_tenants import BYTES, SOMEONE, TwoTenants


async def test_a_published_adapter_is_described_stored_and_loadable(two_tenants: TwoTenants) -> None:
    """The upload's answer, a later read and the engine's view of an adapter agree."""
    made = await two_tenants.publish()

    (version,) = made.versions
    assert (made.name, version.version, version.rank, version.size_bytes) == ("bot", 1, 4, BYTES)
    assert (version.target_modules, version.status) == (("q_proj", "v_proj", "down_proj"), "ready")
    assert (made.created_at, version.created_at) == (two_tenants.clock.now(), two_tenants.clock.now())
    assert await two_tenants.registry.get(two_tenants.a, "bot") == made
    assert two_tenants.stored == {version.digest}
    assert len(ArtifactAdapterSource(LocalArtifacts(two_tenants.root), DESCRIPTION).load(version.digest).pairs) == 6


async def test_other_weights_under_a_name_make_the_next_version(two_tenants: TwoTenants) -> None:
    """Other weights under a name become the next version, and each version keeps its digest."""
    first = await two_tenants.publish(seed=0)
    two_tenants.clock.advance(60)
    second = await two_tenants.publish(seed=1)

    assert [version.version for version in second.versions] == [1, 2]
    assert second.versions[0] == first.versions[0]
    assert second.id == first.id
    assert second.versions[1].created_at == second.created_at + 60
    assert await two_tenants.registry.get(two_tenants.a, "bot") == second


async def test_the_same_bytes_again_are_the_same_version(two_tenants: TwoTenants) -> None:
    """The same bytes give the same version again, also after newer versions and at the tenant's limit."""
    first = await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)

    again = await two_tenants.publish(seed=0, limits=Quota(max_adapters=1, max_adapter_bytes=1))

    assert [version.version for version in again.versions] == [1, 2]
    assert again.versions[0] == first.versions[0]


async def test_the_same_weights_at_another_scale_are_another_version(two_tenants: TwoTenants) -> None:
    """The same weights at another scale become another version."""
    await two_tenants.publish()
    adapter = await two_tenants.publish(lora_alpha=9)

    assert len({version.digest for version in adapter.versions}) == 2


async def test_a_deleted_adapter_is_gone_and_its_name_is_free(two_tenants: TwoTenants) -> None:
    """A deleted adapter is not found, and its name can be used for a new adapter."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))

    freed = await two_tenants.registry.deletions.delete(two_tenants.a, "bot")

    assert len(freed) == 2
    for model in ("bot", "bot@1", "bot@prod"):
        with pytest.raises(NotFound):
            await two_tenants.registry.resolve(two_tenants.a, model, "tiny", SOMEONE)
    again = await two_tenants.publish(seed=2)
    assert [version.version for version in again.versions] == [1]
    assert again.aliases == {}


async def test_a_version_number_is_never_used_again(two_tenants: TwoTenants) -> None:
    """A deleted version's number is not given to later weights."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)
    await two_tenants.registry.deletions.delete_version(two_tenants.a, "bot", 2)

    adapter = await two_tenants.publish(seed=2)
    back = await two_tenants.publish(seed=1)

    assert [version.version for version in adapter.versions] == [1, 3]
    assert [version.version for version in back.versions] == [1, 3, 4]


def answer(error: GraftworkError) -> dict[str, Any]:
    return error.body() | {"status": error.status}


async def test_anothers_adapter_answers_like_one_that_does_not_exist(two_tenants: TwoTenants) -> None:
    """Every action on another tenant's adapter gives the same error as on one that does not exist."""
    await two_tenants.publish("secret")
    await two_tenants.registry.aliases.set(two_tenants.a, "secret", "prod", AliasTarget.to_version(1))
    target = AliasTarget.to_version(1)
    verbs: list[Callable[[str], Any]] = [
        lambda name: two_tenants.registry.get(two_tenants.b, name),
        lambda name: two_tenants.registry.deletions.delete(two_tenants.b, name),
        lambda name: two_tenants.registry.deletions.delete_version(two_tenants.b, name, 1),
        lambda name: two_tenants.registry.aliases.set(two_tenants.b, name, "prod", target),
        lambda name: two_tenants.registry.aliases.remove(two_tenants.b, name, "prod"),
        lambda name: two_tenants.registry.resolve(two_tenants.b, name, "tiny", SOMEONE),
        lambda name: two_tenants.registry.resolve(two_tenants.b, f"{name}@1", "tiny", SOMEONE),
        lambda name: two_tenants.registry.resolve(two_tenants.b, f"{name}@prod", "tiny", SOMEONE),
    ]

    for verb in verbs:
        with pytest.raises(NotFound) as foreign:
            await verb("secret")
        with pytest.raises(NotFound) as unknown:
            await verb("absent")
        assert str(answer(foreign.value)).replace("secret", "absent") == str(answer(unknown.value))

    assert (await two_tenants.registry.list(two_tenants.b)).items == ()
    assert await two_tenants.registry.model_names(two_tenants.b) == ()
    assert (await two_tenants.registry.get(two_tenants.a, "secret")).aliases == {"prod": target}


async def test_tenants_may_use_one_name_for_different_weights(two_tenants: TwoTenants) -> None:
    """Two tenants may use one name, and each resolves it to its own weights."""
    await two_tenants.publish("bot", seed=0, scope=two_tenants.a)
    await two_tenants.publish("bot", seed=1, scope=two_tenants.b)

    digests = [
        (await two_tenants.registry.resolve(scope, "bot", "tiny", SOMEONE)).digest
        for scope in (two_tenants.a, two_tenants.b)
    ]

    assert len(set(digests)) == 2
    await two_tenants.registry.deletions.delete(two_tenants.b, "bot")
    assert (await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny", SOMEONE)).digest == digests[0]


async def test_deleting_all_of_a_tenant_leaves_the_others(two_tenants: TwoTenants) -> None:
    """Deleting a tenant's adapters keeps other tenants' adapters and the artifacts that they share."""
    await two_tenants.publish("one", seed=0)
    await two_tenants.publish("two", seed=1)
    shared = await two_tenants.publish("one", seed=0, scope=two_tenants.b)

    freed = await two_tenants.registry.deletions.delete_all(two_tenants.a)

    assert len(freed) == 1
    assert await two_tenants.registry.model_names(two_tenants.a) == ()
    assert await two_tenants.registry.model_names(two_tenants.b) == ("one",)
    assert two_tenants.stored == {shared.versions[0].digest}


async def test_lists_go_by_age_in_pages(two_tenants: TwoTenants) -> None:
    """Pages by cursor list every adapter once, by age in either order."""
    ids = sorted([(await two_tenants.publish(f"n{seed}", seed=seed)).id for seed in range(5)])

    for order, expected in ((Order.DESCENDING, ids[::-1]), (Order.ASCENDING, ids)):
        seen, after, has_more = [], None, True
        while has_more:
            page = await two_tenants.registry.list(two_tenants.a, PageRequest(limit=2, after=after, order=order))
            seen += [adapter.id for adapter in page.items]
            after, has_more = seen[-1], page.has_more
        assert seen == expected


async def test_anothers_cursor_is_an_unknown_one(two_tenants: TwoTenants) -> None:
    """A cursor of one tenant is unknown to another tenant."""
    adapter = await two_tenants.publish()

    for cursor in (adapter.id, "adp_unknown"):
        with pytest.raises(NotFound):
            await two_tenants.registry.list(two_tenants.b, PageRequest(after=cursor))


async def test_an_adapter_is_gone_with_its_last_version(two_tenants: TwoTenants) -> None:
    """It is in no list, frees its place and its files, and is unknown; its name goes on with the next number."""
    limits = Quota(max_adapters=1)
    await two_tenants.publish("bot", seed=0)
    await two_tenants.registry.deletions.delete_version(two_tenants.a, "bot", 1)

    listed = await two_tenants.registry.list(two_tenants.a)
    for unknown in (
        two_tenants.registry.get(two_tenants.a, "bot"),
        two_tenants.registry.deletions.delete(two_tenants.a, "bot"),
    ):
        with pytest.raises(NotFound, match="does not exist"):
            await unknown
    assert (listed.items, two_tenants.stored) == ((), set())
    other = await two_tenants.publish("other", seed=1, limits=limits)
    await two_tenants.registry.deletions.delete(two_tenants.a, other.name)
    again = await two_tenants.publish("bot", seed=2, limits=limits)
    assert [version.version for version in again.versions] == [2]
