"""Which page goes first: as a search through all pages finds it, at a cost that does not grow with the domains."""

from random import Random

import pytest

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.eviction_queue import EvictionRank
from graftwork.engine.kv.index.radix_tree import Domain, Node
from tests.engine.kv_lab import KvLab


class CountedLru:
    """The page used longest ago goes first; counts how often a page is looked at."""

    def __init__(self) -> None:
        self.num_looks = 0

    def __call__(self, node: Node, tier: Tier) -> EvictionRank:
        self.num_looks += 1
        return 0, 0.0, node.last_used


def may_go(lab: KvLab, asking: Domain) -> list[Node]:
    """The idle ends of paths of whoever holds more than its reserve, and of who asks."""
    page_store = lab.memory.page_store
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
def test_what_goes_is_what_a_search_through_all_pages_finds(seed: int) -> None:
    """Parties come, grow above their reserve, shrink and vanish; each page that is dropped is the lowest that may go."""
    random = Random(seed)
    lab = KvLab(device=60, host=0, context=4, ranking=CountedLru(), reserve_share=0.6)
    page_store = lab.memory.page_store
    num_dropped = 0
    for _ in range(400):
        domain = f"domain {random.randrange(random.choice([2, 5, 12]))}"
        tokens = [random.randrange(3) for _ in range(random.randint(2, 12))]
        lab.run(domain, tokens)
        asking = f"domain {random.randrange(14)}".encode()
        for _ in range(random.randrange(4)):
            candidates, before = may_go(lab, asking), set(page_store.tree.nodes_on(Tier.DEVICE))
            page_store.make_room(Tier.DEVICE, page_store.device.free_pages + 1, asking)
            gone = before - set(page_store.tree.nodes_on(Tier.DEVICE))
            assert len(gone) == min(len(candidates), 1)
            assert all(node.last_used == min(one.last_used for one in candidates) for node in gone)
            num_dropped += len(gone)
        lab.memory.check_integrity()
    assert num_dropped > 200


@pytest.mark.parametrize("reserve_share", [0.0, 0.95])
def test_a_page_costs_as_much_among_many_parties_as_among_few(reserve_share: float) -> None:
    """Dropping 64 pages of 8 domains or of 800 looks at about as many pages, whether most are sheltered or none."""
    looks: dict[int, int] = {}
    for num_domains in (8, 800):
        ranking = CountedLru()
        lab = KvLab(device=2400, host=0, context=4, ranking=ranking, reserve_share=reserve_share)
        page_store = lab.memory.page_store
        for number in range(num_domains):
            lab.run(f"domain {number}", [7, 7, number % 50, number // 50])
        lab.run("large", [number % 11 for number in range(1200)])
        page_store.make_room(Tier.DEVICE, page_store.device.free_pages + 1, b"asking")
        ranking.num_looks = 0
        free = page_store.device.free_pages
        for number in range(1, 65):
            assert page_store.make_room(Tier.DEVICE, free + number, b"asking") == free + number
        looks[num_domains] = ranking.num_looks

    assert looks[800] <= 2 * looks[8]
