"""Tests of adapters among KV pages: the order of eviction, admission, and the reserves of both."""

import pytest

from graftwork.engine.core.prefix_keys import CacheScope, PrefixScope
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.radix_tree import PUBLIC
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.engine.lora.device_pool import PlacementResult
from tests.engine.tagged_kv_cache import TaggedKvCache, adapter_of

FIVE, OTHER_FIVE = 2, 5
"""Numbers of adapters of five frames; 0, 3 and 6 are of one."""


def place(cache: TaggedKvCache, *numbers: int) -> PlacementResult:
    return cache.adapters.place([adapter_of(number) for number in numbers], spared=())


def run_turn(cache: TaggedKvCache, session: str, tokens: list[int]) -> None:
    """Runs a turn of a session, whose pages are then on the host too, without a lease."""
    cache.run("alice", tokens, session)
    cache.kv_cache.offloader.save(cache.kv_cache.page_store.tree.walk(cache.path("alice", tokens).scope, tokens))
    cache.fire_all()


def on_device(cache: TaggedKvCache, tokens: list[int]) -> int:
    nodes = cache.kv_cache.page_store.tree.walk(cache.path("alice", tokens).scope, tokens)
    return sum(node.device is not None for node in nodes)


def test_what_was_used_longest_ago_goes_first_page_or_adapter() -> None:
    """Pages and adapters are evicted together in the order of their last use."""
    cache = TaggedKvCache(device=14, host=20, reserve_share=0.0)
    old, new = [1, 1, 1, 2, 1, 3], [2, 1, 2, 2, 2, 3]
    run_turn(cache, "old", old)
    assert place(cache, FIVE) is PlacementResult.DONE
    run_turn(cache, "new", new)

    first = cache.kv_cache.allocate_pages(5, b"bob")
    assert (on_device(cache, old), on_device(cache, new), cache.adapters.num_frames) == (1, 3, 5)
    second = cache.kv_cache.allocate_pages(2, b"bob")
    assert (on_device(cache, old), on_device(cache, new), cache.adapters.num_frames) == (0, 3, 0)

    assert first is not None
    assert second is not None
    cache.check(num_held=7)


def test_an_adapter_that_comes_takes_an_old_session_before_a_newer_adapter() -> None:
    """A new adapter evicts an older adapter, then an older session's pages, and keeps the newer adapter."""
    cache = TaggedKvCache(device=16, host=20, reserve_share=0.0)
    place(cache, 0)
    run_turn(cache, "old", [1, 1, 1, 2, 1, 3, 1, 4])
    place(cache, FIVE)
    taken = cache.kv_cache.allocate_pages(5, b"bob")

    assert place(cache, OTHER_FIVE) is PlacementResult.DONE

    assert taken is not None
    assert cache.adapters.digests == ("adapter-2", "adapter-5")
    assert on_device(cache, [1, 1, 1, 2, 1, 3, 1, 4]) == 1
    cache.check(num_held=5)


@pytest.mark.parametrize(("pinned", "wanted", "expected"), [(False, False, 10), (True, False, 5), (False, True, 5)])
def test_admission_counts_on_idle_adapters_alone(pinned: bool, wanted: bool, expected: int) -> None:
    """Admission counts on the frames of idle adapters, but not of adapters that are used or waited for."""
    cache = TaggedKvCache(device=14, host=0, reserve_share=0.0)
    assert place(cache, FIVE, OTHER_FIVE) is PlacementResult.DONE
    if pinned:
        cache.adapters.pin(f"adapter-{FIVE}")
    cache.adapters.wanted = {f"adapter-{FIVE}"} if wanted else ()

    page_store = cache.kv_cache.page_store
    could_allocate = max(count for count in range(15) if page_store.could_allocate(Tier.DEVICE, count))
    taken = cache.kv_cache.allocate_pages(could_allocate, b"bob")

    assert could_allocate == 4 + expected
    assert taken is not None
    assert cache.kv_cache.allocate_pages(1, b"bob") is None


def test_pages_leave_adapters_their_floor_and_adapters_leave_pages_their_context() -> None:
    """Pages leave adapters their floor, and adapters leave pages one context and the reserves."""
    cache = TaggedKvCache(device=20, host=0, reserve_share=0.3, lora_floor_share=0.25)
    assert place(cache, FIVE, OTHER_FIVE) is PlacementResult.DONE
    for digest in cache.adapters.digests:
        cache.adapters.pin(digest)
    assert place(cache, 0) is PlacementResult.SHARE_IN_USE
    for digest in cache.adapters.digests:
        cache.adapters.unpin(digest)

    taken = cache.kv_cache.allocate_pages(15, b"bob")

    assert taken is not None
    assert cache.adapters.digests == (f"adapter-{OTHER_FIVE}",)
    assert cache.kv_cache.allocate_pages(1, b"bob") is None
    cache.kv_cache.release(taken)
    assert place(cache, FIVE) is PlacementResult.DONE
    cache.check()


def test_frames_that_an_adapter_has_waited_for_are_not_given_to_newcomers() -> None:
    """Frames that a waiting adapter has claimed are not given to new requests."""
    cache = TaggedKvCache(device=14, host=0)
    cache.run("alice", [1, 1, 1, 2, 1, 3])
    page_store = cache.kv_cache.page_store
    before = page_store.could_allocate(Tier.DEVICE, 14)

    cache.adapters.claimed_pages = 5

    assert before
    assert page_store.could_allocate(Tier.DEVICE, 6)
    assert not page_store.could_allocate(Tier.DEVICE, 7)


def test_an_adapter_waits_for_what_runs_rather_than_for_anybodys_reserve() -> None:
    """An adapter waits until a running request ends, and does not evict pages within a domain's reserve."""
    cache = TaggedKvCache(device=20, host=0, reserve_share=0.3)
    tokens = [1, 1, 1, 2, 1, 3]
    cache.run("alice", tokens)
    held = cache.kv_cache.allocate_pages(14, b"bob")
    assert held is not None

    waits = place(cache, FIVE)
    cache.kv_cache.release(held)

    assert waits is PlacementResult.FRAMES_IN_USE
    assert place(cache, FIVE) is PlacementResult.DONE
    assert on_device(cache, tokens) == 3


def test_pages_that_hang_on_public_ones_do_not_keep_an_adapter_out_for_ever() -> None:
    """Public pages with a reserved page behind them stay while a request runs, and are evicted for a waiting adapter
    when none runs."""
    cache = TaggedKvCache(device=20, host=0)
    tokens = list(range(32))
    path = TokenPath(PrefixScope(CacheScope(b"alice"), CacheScope(b"public"), 15), tokens, b"alice")
    allocation = cache.kv_cache.allocate_path(path, cache.kv_cache.match(path), len(tokens))
    assert allocation is not None
    cache.compute(path, allocation)
    cache.kv_cache.insert(path, allocation.pages, None)
    cache.kv_cache.release(allocation.pages)
    page_store = cache.kv_cache.page_store
    running = cache.kv_cache.allocate_pages(1, b"bob")
    assert running is not None

    waits, left = place(cache, FIVE), page_store.used_pages(Tier.DEVICE, b"alice")
    cache.kv_cache.release(running)

    assert (waits, left) == (PlacementResult.FRAMES_IN_USE, 1)
    assert place(cache, FIVE) is PlacementResult.DONE
    assert (page_store.used_pages(Tier.DEVICE, b"alice"), page_store.used_pages(Tier.DEVICE, PUBLIC)) == (0, 15)


def test_the_smallest_device_for_an_adapter_is_found_exactly() -> None:
    """The computed smallest device has room for the adapter, and one frame less has not."""
    for reserve_share, floor_share in [(0.5, 0.125), (0.0, 0.0), (0.9, 0.3), (1.0, 0.125)]:
        sizes = KvSizes(2, 100, 50, 0, 4, reserve_share, floor_share)
        for frames in (1, 2, 7, 60):
            pages = sizes.device_pages_for(frames)
            most = [
                KvSizes(2, 100, count, 0, 4, reserve_share, floor_share).max_lora_pages for count in (pages, pages - 1)
            ]
            assert most[0] >= frames > most[1]


def test_each_load_is_taken_once() -> None:
    """The bytes of a loaded adapter are given to one caller; after an eviction and another load, to one more."""
    cache = TaggedKvCache(device=14, host=20, reserve_share=0.0)
    digest, size = adapter_of(FIVE).digest, adapter_of(FIVE).num_bytes
    place(cache, FIVE)
    taken = [cache.adapters.take_loaded_bytes(digest) for _ in range(2)]

    cache.adapters.evict(digest)
    gone = cache.adapters.take_loaded_bytes(digest)
    place(cache, FIVE)

    assert taken == [size, 0]
    assert gone == 0
    assert cache.adapters.take_loaded_bytes(digest) == size
