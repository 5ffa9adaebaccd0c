"""Adapters among pages: who goes first, what admission may count on, and what neither can take from the other."""

import pytest

from graftwork.engine.core.prefix_keys import CacheScope, PrefixScope
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_store import KvSizes
from graftwork.engine.kv.index.radix_tree import PUBLIC
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.engine.lora.device_pool import PlacementResult
from tests.engine.kv_lab import KvLab, adapter_of

FIVE, OTHER_FIVE = 2, 5
"""Numbers of adapters of five frames; 0, 3 and 6 are of one."""


def place(lab: KvLab, *numbers: int) -> PlacementResult:
    return lab.adapters.place([adapter_of(number) for number in numbers], spared=())


def talk(lab: KvLab, session: str, tokens: list[int]) -> None:
    """A turn of a session whose pages then stand on the host too, without a lease."""
    lab.run("alice", tokens, session)
    lab.kv_cache.offloader.save(lab.kv_cache.page_store.tree.walk(lab.path("alice", tokens).scope, tokens))
    lab.fire_all()


def on_device(lab: KvLab, tokens: list[int]) -> int:
    nodes = lab.kv_cache.page_store.tree.walk(lab.path("alice", tokens).scope, tokens)
    return sum(node.device is not None for node in nodes)


def test_what_was_used_longest_ago_goes_first_page_or_adapter() -> None:
    """An old session, an adapter, a newer session; a request that needs half of the session's pages takes those, and
    one that needs more takes the adapter before anything of the newer session."""
    lab = KvLab(device=14, host=20, reserve_share=0.0)
    old, new = [1, 1, 1, 2, 1, 3], [2, 1, 2, 2, 2, 3]
    talk(lab, "old", old)
    assert place(lab, FIVE) is PlacementResult.DONE
    talk(lab, "new", new)

    first = lab.kv_cache.allocate_pages(5, b"bob")
    assert (on_device(lab, old), on_device(lab, new), lab.adapters.num_frames) == (1, 3, 5)
    second = lab.kv_cache.allocate_pages(2, b"bob")
    assert (on_device(lab, old), on_device(lab, new), lab.adapters.num_frames) == (0, 3, 0)

    assert first is not None
    assert second is not None
    lab.check(num_held=7)


def test_an_adapter_that_comes_takes_an_old_session_before_a_newer_adapter() -> None:
    """Two adapters and a session between them: the older goes, then pages of the session, and the newer stays."""
    lab = KvLab(device=16, host=20, reserve_share=0.0)
    place(lab, 0)
    talk(lab, "old", [1, 1, 1, 2, 1, 3, 1, 4])
    place(lab, FIVE)
    taken = lab.kv_cache.allocate_pages(5, b"bob")

    assert place(lab, OTHER_FIVE) is PlacementResult.DONE

    assert taken is not None
    assert lab.adapters.digests == ("adapter-2", "adapter-5")
    assert on_device(lab, [1, 1, 1, 2, 1, 3, 1, 4]) == 1
    lab.check(num_held=5)


@pytest.mark.parametrize(("pinned", "wanted", "expected"), [(False, False, 10), (True, False, 5), (False, True, 5)])
def test_admission_counts_on_idle_adapters_alone(pinned: bool, wanted: bool, expected: int) -> None:
    """Of two adapters of five frames on a device of 14: both if they are idle, the other if one is used or waited for;
    and what is counted on can be had."""
    lab = KvLab(device=14, host=0, reserve_share=0.0)
    assert place(lab, FIVE, OTHER_FIVE) is PlacementResult.DONE
    if pinned:
        lab.adapters.pin(f"adapter-{FIVE}")
    lab.adapters.wanted = {f"adapter-{FIVE}"} if wanted else ()

    page_store = lab.kv_cache.page_store
    could_allocate = max(count for count in range(15) if page_store.could_allocate(Tier.DEVICE, count))
    taken = lab.kv_cache.allocate_pages(could_allocate, b"bob")

    assert could_allocate == 4 + expected
    assert taken is not None
    assert lab.kv_cache.allocate_pages(1, b"bob") is None


def test_pages_leave_adapters_their_floor_and_adapters_leave_pages_their_context() -> None:
    """On a device of 20 with a floor of 5, pages can have 15, and one adapter of five stays; with a context of 4 and a
    reserve of 6, adapters can have 10 and not one frame more."""
    lab = KvLab(device=20, host=0, reserve_share=0.3, lora_floor_share=0.25)
    assert place(lab, FIVE, OTHER_FIVE) is PlacementResult.DONE
    for digest in lab.adapters.digests:
        lab.adapters.pin(digest)
    assert place(lab, 0) is PlacementResult.SHARE_IN_USE
    for digest in lab.adapters.digests:
        lab.adapters.unpin(digest)

    taken = lab.kv_cache.allocate_pages(15, b"bob")

    assert taken is not None
    assert lab.adapters.digests == (f"adapter-{OTHER_FIVE}",)
    assert lab.kv_cache.allocate_pages(1, b"bob") is None
    lab.kv_cache.release(taken)
    assert place(lab, FIVE) is PlacementResult.DONE
    lab.check()


def test_frames_that_an_adapter_has_waited_for_are_not_given_to_newcomers() -> None:
    """With five claimed of 14, and three of an idle session that its domain is sure of, a newcomer may count on six."""
    lab = KvLab(device=14, host=0)
    lab.run("alice", [1, 1, 1, 2, 1, 3])
    page_store = lab.kv_cache.page_store
    before = page_store.could_allocate(Tier.DEVICE, 14)

    lab.adapters.claimed_pages = 5

    assert before
    assert page_store.could_allocate(Tier.DEVICE, 6)
    assert not page_store.could_allocate(Tier.DEVICE, 7)


def test_an_adapter_waits_for_what_runs_rather_than_for_anybodys_reserve() -> None:
    """Bob's running requests and Alice's idle session, which is within her reserve, leave three frames of five: the
    adapter waits until Bob has ended, and Alice's pages are still there."""
    lab = KvLab(device=20, host=0, reserve_share=0.3)
    tokens = [1, 1, 1, 2, 1, 3]
    lab.run("alice", tokens)
    held = lab.kv_cache.allocate_pages(14, b"bob")
    assert held is not None

    waits = place(lab, FIVE)
    lab.kv_cache.release(held)

    assert waits is PlacementResult.FRAMES_IN_USE
    assert place(lab, FIVE) is PlacementResult.DONE
    assert on_device(lab, tokens) == 3


def test_pages_that_hang_on_public_ones_do_not_keep_an_adapter_out_for_ever() -> None:
    """A long public prefix, more than its reserve, with one page of Alice's, within hers, at its end: while something
    runs both stay, and when nothing does they go as far as they must."""
    lab = KvLab(device=20, host=0)
    tokens = list(range(32))
    path = TokenPath(PrefixScope(CacheScope(b"alice"), CacheScope(b"public"), 15), tokens, b"alice")
    allocation = lab.kv_cache.allocate_path(path, lab.kv_cache.match(path), len(tokens))
    assert allocation is not None
    lab.compute(path, allocation)
    lab.kv_cache.insert(path, allocation.pages, None)
    lab.kv_cache.release(allocation.pages)
    page_store = lab.kv_cache.page_store
    running = lab.kv_cache.allocate_pages(1, b"bob")
    assert running is not None

    waits, left = place(lab, FIVE), page_store.used_pages(Tier.DEVICE, b"alice")
    lab.kv_cache.release(running)

    assert (waits, left) == (PlacementResult.FRAMES_IN_USE, 1)
    assert place(lab, FIVE) is PlacementResult.DONE
    assert (page_store.used_pages(Tier.DEVICE, b"alice"), page_store.used_pages(Tier.DEVICE, PUBLIC)) == (0, 15)


def test_the_smallest_device_for_an_adapter_is_found_exactly() -> None:
    """For every size and share: there is room on it, and none on a device of one frame less."""
    for reserve_share, floor_share in [(0.5, 0.125), (0.0, 0.0), (0.9, 0.3), (1.0, 0.125)]:
        sizes = KvSizes(2, 100, 50, 0, 4, reserve_share, floor_share)
        for frames in (1, 2, 7, 60):
            pages = sizes.device_pages_for(frames)
            most = [
                KvSizes(2, 100, count, 0, 4, reserve_share, floor_share).max_lora_pages for count in (pages, pages - 1)
            ]
            assert most[0] >= frames > most[1]
