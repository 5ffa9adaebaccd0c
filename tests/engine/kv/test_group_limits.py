"""Tests limits of KV that several domains share, as the tenants of one organisation do."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.events import MissReason
from graftwork.engine.core.requests import NO_KV_LIMITS, KvGroupKey, KvLimits
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.kv_limits import KvLimitTable
from tests.engine.tagged_kv_cache import TaggedKvCache

GROUP = KvGroupKey(b"acme group")
PAGE_BYTES = 100
DOMAINS = st.sampled_from([b"a", b"b", b"c"])
BYTES = st.none() | st.integers(0, 3)
GROUPS = st.sampled_from([None, KvGroupKey(b"one"), KvGroupKey(b"two")])


def of_group(device_pages: int | None = None, host_pages: int | None = None) -> KvLimits:
    """Limits of a domain that has none of its own, and shares these."""
    pages = [None if number is None else number * PAGE_BYTES for number in (device_pages, host_pages)]
    return KvLimits(None, None, GROUP, *pages)


def tokens(number: int, num_pages: int) -> tuple[int, ...]:
    return tuple(number for _ in range(2 * num_pages))


def used(cache: TaggedKvCache, tier: Tier, domains: Iterable[str] = ("x", "y", "z")) -> list[int]:
    return [cache.kv_cache.page_store.used_pages(tier, domain.encode()) for domain in domains]


def run(cache: TaggedKvCache, domain: str, prompt: tuple[int, ...], limits: KvLimits) -> None:
    """Runs a request as the scheduler does: its limits hold from its arrival, and again when it has ended."""
    cache.kv_cache.set_limits(domain.encode(), limits)
    cache.run(domain, prompt)
    cache.kv_cache.enforce_limits(domain.encode())
    cache.fire_all()


def test_domains_of_a_group_share_a_limit() -> None:
    """Two domains of a group have no more pages together than the group may have, and a third one keeps all of its own."""
    cache = TaggedKvCache(device=24, host=0, context=8)
    run(cache, "z", tokens(7, 6), NO_KV_LIMITS)
    run(cache, "x", tokens(1, 4), of_group(device_pages=6))

    run(cache, "y", tokens(2, 5), of_group(device_pages=6))

    assert used(cache, Tier.DEVICE) == [3, 3, 6]
    cache.check()


def test_the_domain_with_most_pages_gives_first() -> None:
    """A flood of one domain takes no page from another one of its group that has less than an equal part."""
    cache = TaggedKvCache(device=24, host=0, context=8)
    run(cache, "x", tokens(1, 2), of_group(device_pages=6))

    for number in range(2, 6):
        run(cache, "y", tokens(number, 6), of_group(device_pages=6))

    assert used(cache, Tier.DEVICE) == [2, 4, 0]
    cache.check()


def test_a_lower_limit_of_the_group_reaches_all_its_domains() -> None:
    """The limits that the latest request of any domain brings hold for the pages of the others."""
    cache = TaggedKvCache(device=24, host=0, context=8)
    for number, domain in enumerate(("x", "y", "z")):
        run(cache, domain, tokens(number + 1, 4), of_group(device_pages=20))
    before = used(cache, Tier.DEVICE)

    cache.kv_cache.set_limits(b"z", of_group(device_pages=3))

    assert (before, used(cache, Tier.DEVICE)) == ([4, 4, 4], [1, 1, 1])
    path = cache.path("x", tokens(1, 4))
    node = cache.kv_cache.page_store.tree.walk(path.scope, path.token_ids)
    lost = cache.tags(path)[len(node)]
    assert cache.kv_cache.page_store.eviction_reason(lost) is MissReason.EVICTED_QUOTA


def test_pages_above_the_group_s_limit_move_down() -> None:
    """Pages above the group's limit on the device are copied to the host, and above that on the host to the disk."""
    cache = TaggedKvCache(device=24, host=24, context=8)
    limits = of_group(device_pages=2, host_pages=3)

    for number, domain in enumerate(("x", "y")):
        run(cache, domain, tokens(number + 1, 6), limits)
    cache.fire_all()

    assert sum(used(cache, Tier.DEVICE)) <= 2
    assert sum(used(cache, Tier.HOST)) <= 3
    assert len(cache.disk.pages) == 12
    cache.check()


def test_a_domain_s_own_limit_holds_beside_that_of_its_group() -> None:
    """The narrower limit binds, whichever it is."""
    cache = TaggedKvCache(device=24, host=0, context=8)
    own = KvLimits(2 * PAGE_BYTES, None, GROUP, 5 * PAGE_BYTES, None)

    run(cache, "x", tokens(1, 4), own)
    run(cache, "y", tokens(2, 7), of_group(device_pages=5))

    assert used(cache, Tier.DEVICE) == [2, 3, 0]


def test_a_domain_that_has_left_its_group_does_not_count() -> None:
    """What a domain keeps after its tenant has left the organisation counts no more, nor do forgotten domains."""
    cache = TaggedKvCache(device=24, host=0, context=8)
    run(cache, "x", tokens(1, 4), of_group(device_pages=5))
    cache.kv_cache.set_limits(b"x", NO_KV_LIMITS)

    run(cache, "y", tokens(2, 5), of_group(device_pages=5))
    cache.kv_cache.forget_domain(b"y")

    assert used(cache, Tier.DEVICE) == [4, 0, 0]
    assert cache.kv_cache.page_store.limits.of(b"y") == []
    cache.check()


@given(changes=st.lists(st.tuples(DOMAINS, BYTES, BYTES, GROUPS, BYTES, BYTES)))
def test_the_table_knows_the_latest_limits(changes: list[tuple]) -> None:  # type: ignore[type-arg]
    """At any time each domain has the limits of its latest request, and its group the latest ones of its members."""
    table = KvLimitTable()
    latest: dict[bytes, KvLimits] = {}
    of_groups: dict[KvGroupKey, tuple[int | None, int | None]] = {}

    for domain, device, host, group, group_device, group_host in changes:
        latest[domain] = KvLimits(device, host, group, group_device, group_host)
        if group is not None:
            of_groups[group] = (group_device, group_host)
        table.set(domain, latest[domain])
        table.check_integrity()
        for one, limits in latest.items():
            own = (limits.device_bytes, limits.host_bytes)
            expected = [({one}, *own)] if own != (None, None) else []
            if limits.group is not None:
                members = {other for other, its in latest.items() if its.group == limits.group}
                expected.append((members, *of_groups[limits.group]))
            assert [(set(found.domains), found.device_bytes, found.host_bytes) for found in table.of(one)] == expected


@pytest.mark.parametrize("domain", [b"a", b"stranger"])
def test_no_limit_binds_a_domain_without_limits(domain: bytes) -> None:
    """A domain that was forgotten, or that no request named, has no limits."""
    table = KvLimitTable()
    table.set(b"a", of_group(1))

    table.forget(domain)
    table.forget(b"a")

    assert list(table.of(domain)) == []
    table.check_integrity()
