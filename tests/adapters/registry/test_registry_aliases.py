"""Tests of the registry on both databases: names, aliases and canaries."""

import pytest

from graftwork.adapters.format.specs import AliasTarget, Caller
from graftwork.platform.errors import (
    Conflict,
    NotFound,
    ValidationFailed,
)
from graftwork.platform.pagination import PageRequest
from tests.adapters.registry.two_tenants import SOMEONE, TwoTenants


async def set_weights(two_tenants: TwoTenants, weights: dict[str, float]) -> None:
    target = AliasTarget.from_json({"weights": weights})
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", target)


async def version_for(two_tenants: TwoTenants, caller: Caller) -> int:
    found = (await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny", caller)).version
    assert found is not None
    return found.version


async def test_a_version_that_an_alias_leads_to_cannot_be_deleted(two_tenants: TwoTenants) -> None:
    """A version that an alias or a canary leads to cannot be deleted, and the error names the alias."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.aliases.set(
        two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.9, "2": 0.1}})
    )

    with pytest.raises(Conflict) as caught:
        await two_tenants.registry.deletions.delete_version(two_tenants.a, "bot", 2)

    assert caught.value.details == {"aliases": ["prod"]}
    assert len(two_tenants.stored) == 2


async def test_resolving_a_name_prefers_prod_and_then_the_newest(two_tenants: TwoTenants) -> None:
    """A bare name resolves to the alias `prod` if there is one, else to the newest version."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)

    async def version_of(model: str) -> int | None:
        version = (await two_tenants.registry.resolve(two_tenants.a, model, "tiny", SOMEONE)).version
        return version.version if version else None

    assert await version_of("bot") == 2
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "next", AliasTarget.to_version(2))
    assert [await version_of(model) for model in ("bot", "bot@prod", "bot@next", "bot@2")] == [1, 1, 2, 2]
    await two_tenants.registry.aliases.remove(two_tenants.a, "bot", "prod")
    assert await version_of("bot") == 2
    assert await version_of("tiny") is None


async def test_a_resolved_model_knows_its_digest_and_label(two_tenants: TwoTenants) -> None:
    """A resolved model has the digest for the engine and the label for the usage rows."""
    adapter = await two_tenants.publish()

    resolved = await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny", SOMEONE)
    base = await two_tenants.registry.resolve(two_tenants.a, "tiny", "tiny", SOMEONE)

    assert (resolved.requested, resolved.digest, resolved.label) == ("bot", adapter.versions[0].digest, "bot@1")
    assert (base.requested, base.digest, base.label) == ("tiny", None, "tiny")


async def test_what_is_unknown_or_malformed_is_one_kind_of_not_found(two_tenants: TwoTenants) -> None:
    """Unknown and malformed references give the same error, except for the name in it."""
    await two_tenants.publish()
    models = ["", "none", "bot@2", "bot@prod", "bot@0", "bot@", "@1", "bot@1@1", "../bot", "tiny@1", "\0", "\ud800"]

    for model in models:
        with pytest.raises(NotFound) as caught:
            await two_tenants.registry.resolve(two_tenants.a, model, "tiny", SOMEONE)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        if "@" not in model:
            with pytest.raises(NotFound):
                await two_tenants.registry.get(two_tenants.a, model)
            with pytest.raises(NotFound):
                await two_tenants.registry.list(two_tenants.a, PageRequest(after=model))


async def test_a_caller_keeps_its_version_of_a_canary(two_tenants: TwoTenants) -> None:
    """Each caller always gets the same version of a canary, and other callers get the other version."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await set_weights(two_tenants, {"1": 0.75, "2": 0.25})
    callers = [Caller("user", f"user {number}") for number in range(40)]

    first = [await version_for(two_tenants, caller) for caller in callers]
    again = [await version_for(two_tenants, caller) for caller in callers]

    assert again == first
    assert set(first) == {1, 2}


async def test_a_pin_outlasts_a_change_of_weights(two_tenants: TwoTenants) -> None:
    """Whoever used a version keeps it as long as the alias leads to it, whatever its weight is."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    registry, a = two_tenants.registry, two_tenants.a
    pinned = await registry.resolve(a, "bot", "tiny", SOMEONE)

    await set_weights(two_tenants, {"1": 1e-6, "2": 1e6})
    kept = await registry.resolve(a, "bot", "tiny", SOMEONE, pinned=pinned)
    other_name = await registry.resolve(a, "bot@prod", "tiny", SOMEONE, pinned=pinned)
    await registry.aliases.set(a, "bot", "prod", AliasTarget.to_version(2))
    moved = await registry.resolve(a, "bot", "tiny", SOMEONE, pinned=pinned)

    assert [each.label for each in (pinned, kept, other_name, moved)] == ["bot@1", "bot@1", "bot@2", "bot@2"]


async def test_moving_an_alias_answers_with_where_it_led(two_tenants: TwoTenants) -> None:
    """Moving an alias returns its former target, so that a rollback is possible."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)

    first = await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    second = await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(2))
    removed = await two_tenants.registry.aliases.remove(two_tenants.a, "bot", "prod")

    one, two = AliasTarget.to_version(1), AliasTarget.to_version(2)
    assert [(change.target, change.previous) for change in (first, second, removed)] == [
        (one, None),
        (two, one),
        (None, two),
    ]


async def test_an_alias_leads_only_to_versions_that_exist(two_tenants: TwoTenants) -> None:
    """An alias to a version that does not exist is refused, and the alias stays as it was."""
    await two_tenants.publish()

    with pytest.raises(NotFound):
        await two_tenants.registry.aliases.set(
            two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 1, "2": 1}})
        )
    with pytest.raises(NotFound):
        await two_tenants.registry.aliases.remove(two_tenants.a, "bot", "prod")
    with pytest.raises(ValidationFailed):
        await two_tenants.registry.aliases.set(two_tenants.a, "bot", "1", AliasTarget.to_version(1))
    assert (await two_tenants.registry.get(two_tenants.a, "bot")).aliases == {}


async def test_model_names_list_adapters_and_their_aliases(two_tenants: TwoTenants) -> None:
    """Model names are sorted, have each alias, and leave out adapters without a version."""
    await two_tenants.publish("b", seed=0)
    await two_tenants.publish("a", seed=1)
    await two_tenants.publish("empty", seed=2)
    await two_tenants.registry.deletions.delete_version(two_tenants.a, "empty", 1)
    for alias in ("prod", "beta"):
        await two_tenants.registry.aliases.set(two_tenants.a, "a", alias, AliasTarget.to_version(1))

    assert await two_tenants.registry.model_names(two_tenants.a) == ("a", "a@beta", "a@prod", "b")
    with pytest.raises(NotFound):
        await two_tenants.registry.resolve(two_tenants.a, "empty", "tiny", SOMEONE)
