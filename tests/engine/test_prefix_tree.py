"""The prefix tree and the page pool against a dictionary of prefixes."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graftwork.engine.pages import PageId, PagePool, PagesExhausted
from graftwork.engine.prefix_tree import CacheScope, PrefixTree

SIZE = 2
PAGES = 12
tokens = st.lists(st.integers(0, 1), max_size=4 * SIZE)
scopes = st.sampled_from([CacheScope(b"a"), CacheScope(b"b")])


class TreeMachine(RuleBasedStateMachine):
    """Sequences that lease, compute, insert and go, under pressure; a page's content is the prefix it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.tree = PrefixTree(self.pool, SIZE)
        self.content: dict[PageId, tuple[bytes, tuple[int, ...]]] = {}
        self.running: list[tuple[CacheScope, list[int], list[PageId]]] = []
        self.inserted: set[tuple[bytes, tuple[int, ...]]] = set()

    @rule(scope=scopes, prompt=tokens)
    def start(self, scope: CacheScope, prompt: list[int]) -> None:
        match = self.tree.match(scope, prompt)
        for number, page in enumerate(match.pages, start=1):
            assert self.content[page] == (scope, tuple(prompt[: number * SIZE]))
        needed = len(prompt) // SIZE - len(match.pages)
        idle_in_match = sum(self.pool.holders(page) == 1 for page in match.pages)
        if needed > self.pool.free_pages + self.pool.idle_pages - idle_in_match:
            return
        pages = self.tree.lease(scope, prompt, match)
        self.tree.reclaim(needed - self.pool.free_pages)
        fresh = self.pool.take(needed)
        for number, page in enumerate(fresh, start=len(pages) + 1):
            self.content[page] = (scope, tuple(prompt[: number * SIZE]))
        self.running.append((scope, prompt, pages + fresh))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: Any, keep: bool) -> None:
        scope, prompt, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if keep:
            self.tree.insert(scope, prompt, pages)
            whole = range(SIZE, len(prompt) + 1, SIZE)
            self.inserted |= {(scope, tuple(prompt[:end])) for end in whole}
        self.pool.release(pages)

    @rule(count=st.integers(0, PAGES))
    def reclaim(self, count: int) -> None:
        idle = self.pool.idle_pages
        freed = self.tree.reclaim(count)
        assert freed == min(count, idle)

    @invariant()
    def everything_adds_up(self) -> None:
        self.pool.check_integrity()
        self.tree.check_integrity()
        assert self.pool.free_pages + self.pool.idle_pages + self.pool.active_pages == PAGES
        held = sum(len(pages) for _, _, pages in self.running)
        assert self.pool.num_holders == held + len(self.tree)

    def teardown(self) -> None:
        for _, _, pages in self.running:
            self.pool.release(pages)
        self.tree.reclaim(PAGES)
        assert self.pool.free_pages == PAGES


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(pool: PagePool, tree: PrefixTree, scope: bytes, prompt: list[int]) -> None:
    pages = pool.take(len(prompt) // SIZE)
    tree.insert(CacheScope(scope), prompt, pages)
    pool.release(pages)


def test_match_is_the_longest_cached_prefix_in_whole_pages() -> None:
    """Seven tokens that share five with a cached prompt match two pages of two."""
    pool = PagePool(8)
    tree = PrefixTree(pool, SIZE)
    filled(pool, tree, b"a", [1, 2, 3, 4, 5, 6])

    match = tree.match(CacheScope(b"a"), [1, 2, 3, 4, 5, 9, 9])

    assert len(match.pages) == 2
    assert tree.match(CacheScope(b"b"), [1, 2, 3, 4]).pages == ()


def test_the_least_recently_used_leaf_goes_first_and_is_remembered() -> None:
    """Of two branches the older loses its leaf; a later miss on it is known to be an eviction."""
    pool = PagePool(8)
    tree = PrefixTree(pool, SIZE)
    scope = CacheScope(b"a")
    filled(pool, tree, b"a", [1, 1, 2, 2])
    filled(pool, tree, b"a", [1, 1, 3, 3])
    pool.release(tree.lease(scope, [1, 1, 2, 2], tree.match(scope, [1, 1, 2, 2])))

    tree.reclaim(1)

    assert len(tree.match(scope, [1, 1, 2, 2]).pages) == 2
    evicted = tree.match(scope, [1, 1, 3, 3])
    assert (len(evicted.pages), evicted.was_evicted) == (1, True)
    assert not tree.match(scope, [1, 1, 4, 4]).was_evicted


def test_held_pages_are_never_reclaimed() -> None:
    """A leased prefix survives any pressure; a page that is not free cannot be taken."""
    pool = PagePool(2)
    tree = PrefixTree(pool, SIZE)
    scope = CacheScope(b"a")
    filled(pool, tree, b"a", [1, 1, 2, 2])
    tree.lease(scope, [1, 1, 2, 2], tree.match(scope, [1, 1, 2, 2]))

    assert tree.reclaim(2) == 0
    with pytest.raises(PagesExhausted):
        pool.take(1)


def test_releasing_a_free_page_is_caught() -> None:
    """A double free is an error at once, not a corruption later."""
    pool = PagePool(2)
    pages = pool.take(1)
    pool.release(pages)

    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
