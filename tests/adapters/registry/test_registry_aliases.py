"""Tests of the registry on both databases: names, aliases and canaries."""

import random
from collections import Counter

import pytest

from graftwork.adapters.format.specs import AliasTarget
from graftwork.platform.errors import (
    Conflict,
    NotFound,
    ValidationFailed,
)
from graftwork.platform.pagination import PageRequest
from tests.adapters.registry.two_tenants import TwoTenants


async def test_a_version_that_an_alias_leads_to_cannot_be_deleted(two_tenants: TwoTenants) -> None:
    """A version that an alias or a canary leads to cannot be deleted, and the error names the alias."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.set_alias(
        two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.9, "2": 0.1}})
    )

    with pytest.raises(Conflict) as caught:
        await two_tenants.registry.delete_version(two_tenants.a, "bot", 2)

    assert caught.value.details == {"aliases": ["prod"]}
    assert len(two_tenants.stored) == 2


async def test_resolving_a_name_prefers_prod_and_then_the_newest(two_tenants: TwoTenants) -> None:
    """A bare name resolves to the alias `prod` if there is one, else to the newest version."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)

    async def version_of(model: str) -> int | None:
        version = (await two_tenants.registry.resolve(two_tenants.a, model, "tiny")).version
        return version.version if version else None

    assert await version_of("bot") == 2
    await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    await two_tenants.registry.set_alias(two_tenants.a, "bot", "next", AliasTarget.to_version(2))
    assert [await version_of(model) for model in ("bot", "bot@prod", "bot@next", "bot@2")] == [1, 1, 2, 2]
    await two_tenants.registry.remove_alias(two_tenants.a, "bot", "prod")
    assert await version_of("bot") == 2
    assert await version_of("tiny") is None


async def test_a_resolved_model_knows_its_digest_and_label(two_tenants: TwoTenants) -> None:
    """A resolved model has the digest for the engine and the label for the usage rows."""
    adapter = await two_tenants.publish()

    resolved = await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny")
    base = await two_tenants.registry.resolve(two_tenants.a, "tiny", "tiny")

    assert (resolved.requested, resolved.digest, resolved.label) == ("bot", adapter.versions[0].digest, "bot@1")
    assert (base.requested, base.digest, base.label) == ("tiny", None, "tiny")


async def test_what_is_unknown_or_malformed_is_one_kind_of_not_found(two_tenants: TwoTenants) -> None:
    """Unknown and malformed references give the same error, except for the name in it."""
    await two_tenants.publish()
    models = ["", "none", "bot@2", "bot@prod", "bot@0", "bot@", "@1", "bot@1@1", "../bot", "tiny@1", "\0", "\ud800"]

    for model in models:
        with pytest.raises(NotFound) as caught:
            await two_tenants.registry.resolve(two_tenants.a, model, "tiny")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        if "@" not in model:
            with pytest.raises(NotFound):
                await two_tenants.registry.get(two_tenants.a, model)
            with pytest.raises(NotFound):
                await two_tenants.registry.list(two_tenants.a, PageRequest(after=model))


async def test_a_canary_shares_requests_by_weight(two_tenants: TwoTenants) -> None:
    """A canary draws a version by weight for each request, from the registry's own generator."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.set_alias(
        two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.75, "2": 0.25}})
    )
    expected = random.Random(3).choices([1, 2], weights=[0.75, 0.25], k=1)[0]

    versions = [(await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny")).version for _ in range(40)]

    drawn = Counter(version.version for version in versions if version)
    assert versions[0] is not None
    assert versions[0].version == expected
    assert 20 <= drawn[1] <= 39
    assert drawn[1] + drawn[2] == 40


async def test_moving_an_alias_answers_with_where_it_led(two_tenants: TwoTenants) -> None:
    """Moving an alias returns its former target, so that a rollback is possible."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)

    first = await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    second = await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(2))
    removed = await two_tenants.registry.remove_alias(two_tenants.a, "bot", "prod")

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
        await two_tenants.registry.set_alias(
            two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 1, "2": 1}})
        )
    with pytest.raises(NotFound):
        await two_tenants.registry.remove_alias(two_tenants.a, "bot", "prod")
    with pytest.raises(ValidationFailed):
        await two_tenants.registry.set_alias(two_tenants.a, "bot", "1", AliasTarget.to_version(1))
    assert (await two_tenants.registry.get(two_tenants.a, "bot")).aliases == {}


async def test_model_names_list_adapters_and_their_aliases(two_tenants: TwoTenants) -> None:
    """Model names are sorted, have each alias, and leave out adapters without a version."""
    await two_tenants.publish("b", seed=0)
    await two_tenants.publish("a", seed=1)
    await two_tenants.publish("empty", seed=2)
    await two_tenants.registry.delete_version(two_tenants.a, "empty", 1)
    for alias in ("prod", "beta"):
        await two_tenants.registry.set_alias(two_tenants.a, "a", alias, AliasTarget.to_version(1))

    assert await two_tenants.registry.model_names(two_tenants.a) == ("a", "a@beta", "a@prod", "b")
    with pytest.raises(NotFound):
        await two_tenants.registry.resolve(two_tenants.a, "empty", "tiny")
