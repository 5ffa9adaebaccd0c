"""Which pages the windowed layer groups keep, and which cached prefixes can be continued."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.events import MissReason
from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.page_windows import PageWindows, frames_for, window_key
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.transfer.loader import TokenPath
from tests.engine.tagged_kv_cache import TaggedKvCache

sizes = st.integers(1, 40)


@given(window=sizes, page_tokens=sizes, num_tokens=st.integers(0, 400))
def test_a_page_is_given_up_exactly_when_no_later_query_sees_it(window: int, page_tokens: int, num_tokens: int) -> None:
    """Of the pages before a request's last whole page, the first that is kept is the one before the first that any query
    from there on sees, key by key."""
    windows = PageWindows(window, 1, page_tokens, step_tokens=1)
    last_whole = num_tokens // page_tokens * page_tokens
    seen = {key // page_tokens for key in range(last_whole) if key > last_whole - window}  # by the query at last_whole
    first_seen = min(
        seen, default=(last_whole - window + 1) // page_tokens if window > 1 else last_whole // page_tokens
    )

    assert windows.first_needed(num_tokens // page_tokens) == max(first_seen, 0)
    assert windows.first_page(num_tokens) == max(first_seen - 1, 0)


@given(window=sizes, page_tokens=sizes, step=st.integers(1, 50), steps=st.lists(st.integers(1, 50), max_size=30))
def test_no_request_holds_more_than_the_most(window: int, page_tokens: int, step: int, steps: list[int]) -> None:
    """However a request advances, the pages from the first that it keeps to the end of its next step are at most as many
    as the sizes of an engine count."""
    windows = PageWindows(window, 3, page_tokens, step_tokens=step)
    total, computed = sum(min(one, step) for one in steps), 0
    for one in steps:
        end = computed + min(one, step)
        held = -(-end // page_tokens) - windows.first_page(computed)
        assert held <= windows.most_pages(total)
        computed = end
    assert frames_for(total, page_tokens, windows) <= 4 * -(-total // page_tokens)


def cache_of(window: int, num_groups: int = 2) -> TaggedKvCache:
    windows = PageWindows(window, num_groups, page_tokens=2, step_tokens=64)
    return TaggedKvCache(device=60, host=0, context=12, windows=windows)


def insert(cache: TaggedKvCache, tokens: list[int]) -> tuple[TokenPath, list[Node]]:
    """Computes and caches a prompt."""
    path = cache.path("x", tokens)
    allocation = cache.kv_cache.allocate_path(path, cache.kv_cache.match(path), len(tokens))
    assert allocation is not None
    assert allocation.windows is not None
    cache.compute(path, allocation)
    nodes = cache.kv_cache.insert(path, allocation.pages, None, allocation.windows)
    cache.kv_cache.release([*allocation.pages, *allocation.windows.all_frames])
    return path, nodes


def tails(cache: TaggedKvCache, nodes: list[Node]) -> list[int]:
    """The pages beside which the windowed pages are kept longest."""
    windows = cache.kv_cache.page_store.windows
    return [index for index, node in enumerate(nodes) if all(one.is_tail for one in windows.of([node])[1:])]


def test_windowed_pages_are_kept_before_ends_and_branches() -> None:
    """Those before the end of a prompt, a branch and the end of a session's history are kept; those that a longer prompt
    leaves behind are not."""
    cache = cache_of(window=3)
    _, short = insert(cache, list(range(8)))
    assert tails(cache, short) == [2, 3]  # the query at 8 sees 6 and 7; one page is spare

    path, longer = insert(cache, list(range(20)))
    assert tails(cache, longer) == [8, 9]

    insert(cache, [*range(12), 90, 91])
    _, nodes = insert(cache, list(range(20)))
    assert tails(cache, nodes) == [4, 5, 8, 9]

    cache.kv_cache.set_history(cache.path("x", path.token_ids[:4]), SessionUse(SessionKey("s")))
    _, nodes = insert(cache, list(range(20)))
    assert tails(cache, nodes) == [0, 1, 4, 5, 8, 9]
    cache.check()


def test_windowed_pages_go_before_others_and_those_in_the_middle_first() -> None:
    """When room is needed, first all windowed pages in the middle of a prompt go, and the prompt can still be continued
    at its end. With those of the last page gone, one page earlier; then nowhere, though all pages of tokens are there."""
    cache = cache_of(window=3)
    path, nodes = insert(cache, list(range(20)))
    store = cache.kv_cache.page_store

    store.make_room(Tier.DEVICE, 60 - 10 - 4, b"x")

    assert store.tree.num_copies(Tier.DEVICE) == 10 + 4
    assert [index for index, node in enumerate(nodes) if store.tree.windows_of(node)] == [8, 9]
    assert len(cache.kv_cache.match(path)) == 10
    assert len(cache.kv_cache.match(cache.path("x", list(range(16))))) == 0
    store.tree.remove_subtree(store.tree.windows_of(nodes[9])[1])
    assert len(cache.kv_cache.match(path)) == 9
    store.tree.remove_subtree(store.tree.windows_of(nodes[8])[0])
    assert len(cache.kv_cache.match(path)) == 0
    assert len(cache.kv_cache.cached(path)) == 10
    cache.check()


def test_what_lacks_a_group_is_evicted_next() -> None:
    """When the page of one windowed group is lost, the other group's page beside it goes next, though it was used last."""
    cache = cache_of(window=3)
    _, nodes = insert(cache, list(range(8)))
    store = cache.kv_cache.page_store
    store.make_room(Tier.DEVICE, 60 - 4 - 4, b"x")
    lost, useless = store.tree.windows_of(nodes[3])

    store.evict(lost, Tier.DEVICE, MissReason.EVICTED_PRESSURE)
    store.make_room(Tier.DEVICE, store.device.free_pages + 1, b"x")

    assert useless.device is None
    assert len(store.tree.windows_of(nodes[2])) == 2
    cache.check()


def test_a_page_that_leads_nowhere_goes_before_what_was_used_earlier() -> None:
    """When the windowed pages at the end of a prompt are lost, the page beside them goes before those of an older prompt,
    and then the prompt is continued one page earlier."""
    cache = cache_of(window=3)
    insert(cache, [50, 51, 52, 53])
    path, nodes = insert(cache, list(range(8)))
    store = cache.kv_cache.page_store
    store.make_room(Tier.DEVICE, 60 - (4 + 4) - (2 + 4), b"x")

    for window in store.tree.windows_of(nodes[3]):
        store.evict(window, Tier.DEVICE, MissReason.EVICTED_PRESSURE)
    store.make_room(Tier.DEVICE, store.device.free_pages + 1, b"x")

    assert nodes[3].device is None
    assert len(cache.kv_cache.match(path)) == 3
    assert len(cache.kv_cache.match(cache.path("x", [50, 51, 52, 53]))) == 2
    cache.check()


def test_a_window_key_is_no_other_key() -> None:
    """The keys of windowed pages differ by page and by group, and from the pages' own keys."""
    pages = [PageKey(bytes([number]) * 32) for number in range(3)]

    keys = {window_key(page, group) for page in pages for group in range(7)}

    assert len(keys | set(pages)) == 3 * 7 + 3


def test_page_tables_begin_at_the_first_page_that_is_left() -> None:
    """After pages were given up and moved, the tables have the others' new numbers, one table for each group."""
    held = WindowPages()
    held.extend([PageId(number) for number in (10, 11, 20, 21, 30, 31)], 2)

    assert held.drop_before(1) == [10, 11]
    assert held.drop_before(1) == []
    held.rename({PageId(21): PageId(5)})

    tables = held.tables(3)
    assert (tables.first, tables.tables) == (1, ((20, 30), (5, 31)))
    assert held.tables(2).tables == ((20,), (5,))
    assert (held.end, held.all_frames) == (3, [20, 5, 30, 31])
