"""Tests pages that are saved while their request runs."""

from graftwork.engine.core.prefix_keys import CacheScope, PrefixScope
from graftwork.engine.core.requests import KvLimits, SessionKey, SessionUse
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.engine.kv.transfer.plan import TransferKind
from tests.engine.tagged_kv_cache import TaggedKvCache


def offloaded(cache: TaggedKvCache, tokens: tuple[int, ...]) -> list[Node]:
    """Runs a request of domain `x` with a public first page, offloads it, and returns its nodes."""
    path = TokenPath(PrefixScope(CacheScope(b"x"), CacheScope(b"public"), 1), tokens, b"x")
    allocation = cache.kv_cache.allocate_path(path, cache.kv_cache.match(path), len(tokens))
    assert allocation is not None
    cache.compute(path, allocation)
    cache.kv_cache.offload(path, allocation.pages, None)
    cache.fire_all()
    return cache.kv_cache.page_store.tree.walk(path.scope, path.token_ids)


def test_the_host_keeps_new_pages_of_a_running_request() -> None:
    """The host keeps the new pages of a running request, which are in no history yet, and evicts older pages that are
    also on disk."""
    cache = TaggedKvCache(device=8, host=6)
    use = SessionUse(SessionKey("running"))
    cache.run("x", (1, 2, 3, 4), "old")
    old = cache.kv_cache.page_store.tree.nodes_on(Tier.DEVICE)
    cache.kv_cache.offloader.save(old)
    cache.fire_all()
    path = cache.path("x", (5, 6, 7, 8, 9, 1, 2, 3))
    allocation = cache.kv_cache.allocate_path(path, cache.kv_cache.match(path), 8, use)
    assert allocation is not None
    cache.compute(path, allocation)
    made = cache.kv_cache.insert(path, allocation.pages, use)
    cache.kv_cache.offloader.save(made)
    cache.fire_all()

    cache.run("x", (3, 3, 3, 3), "next")
    cache.kv_cache.offloader.save(cache.kv_cache.page_store.tree.nodes_on(Tier.DEVICE))
    cache.fire_all()

    assert [node.host is not None for node in made] == [True] * 4
    assert [node.host is not None for node in old] == [False] * 2
    cache.check(num_held=4)


def test_a_limit_on_the_host_holds_after_a_public_prefix() -> None:
    """After a copy whose first page is public, a domain has only the two pages on the host that its limit allows."""
    cache = TaggedKvCache(device=8, host=8)
    cache.kv_cache.set_limits(b"x", KvLimits(host_bytes=200))

    offloaded(cache, (1, 2, 3, 4, 5, 6, 7, 8))

    assert cache.kv_cache.page_store.used_pages(Tier.HOST, b"x") == 2
    cache.check()


def test_a_domain_makes_its_own_room_after_a_public_prefix() -> None:
    """A host full of a domain's older pages takes all of the domain's next path, whose first page is public."""
    cache = TaggedKvCache(device=12, host=4)
    cache.run("x", (9, 9, 9, 9, 9, 9, 9, 9))
    cache.kv_cache.offloader.save(cache.kv_cache.page_store.tree.nodes_on(Tier.DEVICE))
    cache.fire_all()

    nodes = offloaded(cache, (1, 2, 3, 4, 5, 6, 7, 8))

    assert [node.host is not None for node in nodes] == [True] * 4
    cache.check()


def test_no_room_is_made_for_a_page_that_cannot_be_saved() -> None:
    """A page whose parent is not on the host is not saved, and no page is evicted for it."""
    cache = TaggedKvCache(device=12, host=2)
    cache.run("x", (9, 9, 9, 9))
    kept = cache.kv_cache.page_store.tree.nodes_on(Tier.DEVICE)
    cache.kv_cache.offloader.save(kept)
    cache.fire_all()
    cache.run("x", (1, 2, 3, 4))

    cache.kv_cache.offloader.save(
        [node for node in cache.kv_cache.page_store.tree.nodes_on(Tier.DEVICE) if node.depth == 1]
    )

    assert [node.host is not None for node in kept] == [True, True]
    cache.check()


def test_queues_stay_bounded_behind_a_slow_disk() -> None:
    """While one slow write runs and sessions come and close, the queues of pages to write stay bounded."""
    cache = TaggedKvCache(device=12, host=8)
    kv_cache = cache.kv_cache
    for number in range(100):
        path, use = cache.path("x", (number, 0, number, 1)), SessionUse(SessionKey(f"s{number}"))
        allocation = kv_cache.allocate_path(path, kv_cache.match(path), 4, use)
        assert allocation is not None
        cache.compute(path, allocation)
        nodes = kv_cache.insert(path, allocation.pages, use)
        kv_cache.set_history(path, use)
        kv_cache.release(allocation.pages)
        kv_cache.offloader.save(nodes)
        kv_cache.finish_transfer(cache.copies.fire(-1))
        kv_cache.offloader.store(nodes)
        kv_cache.close_session(path, use)
        cache.check()

    assert [plan.kind for plan, _ in cache.copies.under_way] == [TransferKind.STORE]
