"""Tests of the registry on both databases: limits, and uploads at the same time."""

import asyncio
from typing import Any

import pytest

from graftwork.adapters.format.specs import Adapter
from graftwork.platform.errors import (
    BudgetSpent,
    Conflict,
    GraftworkError,
    ValidationFailed,
)
from graftwork.platform.quotas.limits import LIMIT_HEADER
from graftwork.platform.quotas.quota import Quota
from tests.adapters.registry.two_tenants import BYTES, TwoTenants


def answer(error: GraftworkError) -> dict[str, Any]:
    return error.body() | {"status": error.status}


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Quota(max_adapters=1), "max_adapters_exceeded"),
        (Quota(max_adapter_bytes=2 * BYTES - 1), "max_adapter_bytes_exceeded"),
        (Quota(max_adapters=0), "max_adapters_exceeded"),
    ],
)
async def test_a_limit_on_number_or_bytes_is_a_429_that_says_not_to_retry(
    two_tenants: TwoTenants, limits: Quota, code: str
) -> None:
    """An upload above the limit of number or bytes is a 429 without retry, and leaves nothing."""
    await two_tenants.publish("one", seed=0)

    with pytest.raises(BudgetSpent) as caught:
        await two_tenants.publish("two", seed=1, limits=limits)

    assert (caught.value.status, caught.value.code) == (429, code)
    limit = code.removesuffix("_exceeded")
    assert caught.value.headers() == {"x-should-retry": "false", LIMIT_HEADER: f"tenant.{limit}"}
    assert await two_tenants.registry.model_names(two_tenants.a) == ("one",)
    assert len(two_tenants.stored) == 1


async def test_a_limit_counts_only_ones_own(two_tenants: TwoTenants) -> None:
    """A limit counts the tenant's own adapters only, and can be reached exactly."""
    await two_tenants.publish("one", seed=0, scope=two_tenants.b)

    limits = Quota(max_adapters=1, max_adapter_bytes=2 * BYTES, max_adapter_rank=4)
    await two_tenants.publish("one", seed=0, limits=limits)
    await two_tenants.publish("one", seed=1, limits=limits)

    assert len((await two_tenants.registry.get(two_tenants.a, "one")).versions) == 2


@pytest.mark.parametrize(
    ("config", "param"), [({}, "config.r"), ({"r": 2, "rank_pattern": {".*": 4}}, "config.rank_pattern")]
)
async def test_a_rank_above_the_tenants_limit_fails_validation(
    two_tenants: TwoTenants, config: dict[str, Any], param: str
) -> None:
    """A rank above the tenant's limit is a 422, because only another upload can help."""
    with pytest.raises(ValidationFailed) as caught:
        await two_tenants.publish(limits=Quota(max_adapter_rank=3), **config)

    assert caught.value.param == param
    assert two_tenants.stored == set()


async def test_limits_are_exact_when_uploads_race(two_tenants: TwoTenants) -> None:
    """Of six uploads at once under a limit of three, three are kept and three leave nothing."""
    uploads = [two_tenants.publish(f"n{seed}", seed=seed, limits=Quota(max_adapters=3)) for seed in range(6)]

    results = await asyncio.gather(*uploads, return_exceptions=True)

    kept = [result for result in results if isinstance(result, Adapter)]
    assert len(kept) == 3
    assert all(isinstance(result, Adapter | BudgetSpent) for result in results)
    assert two_tenants.stored == {adapter.versions[0].digest for adapter in kept}


async def test_racing_uploads_of_one_adapter_are_one_version(two_tenants: TwoTenants) -> None:
    """Uploads of one adapter at the same time all get the same version."""
    results = await asyncio.gather(*(two_tenants.publish() for _ in range(6)))

    assert len({adapter.versions[0] for adapter in results}) == 1
    assert [len(adapter.versions) for adapter in results] == [1] * 6


async def test_racing_uploads_under_one_name_never_share_a_number(two_tenants: TwoTenants) -> None:
    """Of six uploads of different weights under one name at the same time some lose; pushed again, all get numbers."""
    waiting = set(range(6))
    while waiting:
        seeds = sorted(waiting)
        results = await asyncio.gather(*(two_tenants.publish(seed=seed) for seed in seeds), return_exceptions=True)
        lost = {seed for seed, result in zip(seeds, results, strict=True) if isinstance(result, Conflict)}
        assert [result for result in results if not isinstance(result, Adapter | Conflict)] == []
        assert lost < waiting
        waiting = lost

    adapter = await two_tenants.registry.get(two_tenants.a, "bot")
    assert [version.version for version in adapter.versions] == [1, 2, 3, 4, 5, 6]
    assert len(two_tenants.stored) == 6
