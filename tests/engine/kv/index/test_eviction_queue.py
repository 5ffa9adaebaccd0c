"""Compares evictions with a search of all pages, and tests that their cost does not grow with the number of domains."""

from random import Random

import pytest

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.eviction_queue import EvictionRank
from graftwork.engine.kv.index.radix_tree import Domain, Node
from tests.engine.tagged_kv_cache import TaggedKvCache


class CountedLru:
    """Ranks pages by last use, and counts how often it is called."""

    def __init__(self) -> None:
        self.num_looks = 0

    def __call__(self, node: Node, tier: Tier) -> EvictionRank:
        self.num_looks += 1
        return 0, 0.0, node.last_used


def evictable_nodes(cache: TaggedKvCache, asking: Domain) -> list[Node]:
    """Returns the idle leaves of the asking domain and of all domains above their reserve."""
    page_store = cache.kv_cache.page_store
    reserve = page_store.reserve_pages(Tier.DEVICE)
    return [
        node
        for node in page_store.tree.nodes_on(Tier.DEVICE)
        if (node.domain == asking or page_store.used_pages(Tier.DEVICE, node.domain) > reserve)
        and node.is_leaf_on(Tier.DEVICE)
        and node.device is not None
        and page_store.device.is_idle(node.device)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_the_evicted_page_is_the_one_that_a_full_search_finds(seed: int) -> None:
    """While domains grow above their reserve, shrink and vanish, each evicted page is the least recently used one that
    may go."""
    random = Random(seed)
    cache = TaggedKvCache(device=60, host=0, context=4, ranking=CountedLru(), reserve_share=0.6)
    page_store = cache.kv_cache.page_store
    num_dropped = 0
    for _ in range(400):
        domain = f"domain {random.randrange(random.choice([2, 5, 12]))}"
        tokens = [random.randrange(3) for _ in range(random.randint(2, 12))]
        cache.run(domain, tokens)
        asking = f"domain {random.randrange(14)}".encode()
        for _ in range(random.randrange(4)):
            candidates, before = evictable_nodes(cache, asking), set(page_store.tree.nodes_on(Tier.DEVICE))
            page_store.make_room(Tier.DEVICE, page_store.device.free_pages + 1, asking)
            gone = before - set(page_store.tree.nodes_on(Tier.DEVICE))
            assert len(gone) == min(len(candidates), 1)
            assert all(node.last_used == min(one.last_used for one in candidates) for node in gone)
            num_dropped += len(gone)
        cache.kv_cache.check_integrity()
    assert num_dropped > 200


@pytest.mark.parametrize("reserve_share", [0.0, 0.95])
def test_an_eviction_costs_the_same_with_many_domains_as_with_few(reserve_share: float) -> None:
    """Evicting 64 pages ranks about as many pages among 800 domains as among 8, whether most are protected or none."""
    looks: dict[int, int] = {}
    for num_domains in (8, 800):
        ranking = CountedLru()
        cache = TaggedKvCache(device=2400, host=0, context=4, ranking=ranking, reserve_share=reserve_share)
        page_store = cache.kv_cache.page_store
        for number in range(num_domains):
            cache.run(f"domain {number}", [7, 7, number % 50, number // 50])
        cache.run("large", [number % 11 for number in range(1200)])
        page_store.make_room(Tier.DEVICE, page_store.device.free_pages + 1, b"asking")
        ranking.num_looks = 0
        free = page_store.device.free_pages
        for number in range(1, 65):
            assert page_store.make_room(Tier.DEVICE, free + number, b"asking") == free + number
        looks[num_domains] = ranking.num_looks

    assert looks[800] <= 2 * looks[8]
