"""Compares the order in which pages are allocated with a sorted list of the free pages."""

from random import Random

from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.page_pool import PagePool

NUM_PAGES = 10_000
"""More than two blocks of the pool's search for free pages."""


def test_the_lowest_free_pages_are_allocated_first() -> None:
    """Whatever was released, lent or moved, an allocation takes the free pages with the lowest numbers, and says up to which."""
    random = Random(1)
    pool, free, held, lent = PagePool(NUM_PAGES), set(range(NUM_PAGES)), set[int](), set[int]()
    reported: list[int] = []
    pool.on_taken = reported.append
    for _ in range(300):
        count = random.randint(0, min(len(free), random.choice([3, 500, 6000])))
        expected = sorted(free)[:count]
        assert pool.allocate(count) == expected
        assert reported == expected[-1:]
        reported.clear()
        free.difference_update(expected)
        held.update(expected)

        gone = random.sample(sorted(held), random.randint(0, len(held)))
        pool.release(map(PageId, gone))
        held.difference_update(gone)
        free.update(gone)

        back = random.sample(sorted(lent), random.randint(0, len(lent)))
        pool.reclaim(map(PageId, back))
        lent.difference_update(back)
        free.update(back)

        taken = random.sample(sorted(free), min(len(free), 20))
        pool.lend(map(PageId, taken))
        free.difference_update(taken)
        lent.update(taken)

        if held and free:
            source, target = random.choice(sorted(held)), random.choice(sorted(free))
            pool.relocate(PageId(source), PageId(target))
            held.symmetric_difference_update((source, target))
            free.symmetric_difference_update((source, target))
    pool.check_integrity()
