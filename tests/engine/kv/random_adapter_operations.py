"""Random operations on the adapters that share a device with a KV cache."""

from collections import Counter
from collections.abc import Sequence

from graftwork.engine.core.tiers import Tier
from graftwork.engine.lora.device_pool import PlacementResult
from tests.engine.kv.expected_requests import RunningRequest
from tests.engine.tagged_kv_cache import TaggedKvCache, adapter_of

DOMAINS = (b"x", b"y", b"z")


class AdapterOperations:
    """Places, pins and deletes adapters. Every operation gets two numbers and some tokens to choose by."""

    cache: TaggedKvCache
    running: list[RunningRequest]
    pinned: list[str]
    seen: Counter[str]

    def place_adapters(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Places one or two adapters for a request. There is always room if nothing is in use."""
        adapters, pool = self.cache.adapters, self.cache.kv_cache.page_store.device
        group = {f"adapter-{number}": adapter_of(number) for number in {first, second if second % 2 else first}}
        adapters.wanted = set(group)
        away = [adapter for digest, adapter in group.items() if digest not in adapters]
        room, kv_cache = adapters.frame_allocator, self.cache.kv_cache
        cached = kv_cache.page_store.tree.num_copies(Tier.DEVICE)
        before = room.num_relocated_pages, room.num_moved_runs, len(adapters.digests)
        is_used = pool.active_pages > 0
        sure, kept = kv_cache.page_store.reserve_pages(Tier.DEVICE), self.used_by_domain()
        result = adapters.place(away, group.keys())
        for domain, now in self.used_by_domain().items():
            sure = min(sure, kv_cache.page_store.reserve_pages(Tier.DEVICE))
            assert not is_used or now == kept[domain] or now >= sure, "an adapter pushed a domain below its reserve"
        is_quiet = not self.running and not self.pinned and not pool.in_flight_pages
        assert result is PlacementResult.DONE or not is_quiet, "adapters wait though nothing is in use"
        assert all((adapter.digest in adapters) == (result is PlacementResult.DONE) for adapter in away)
        self.seen[result.name] += bool(away)
        self.seen["KV was evicted"] += kv_cache.page_store.tree.num_copies(Tier.DEVICE) < cached
        self.seen["relocations"] += room.num_relocated_pages > before[0]
        self.seen["compactions"] += room.num_moved_runs > before[1]

    def used_by_domain(self) -> dict[bytes, int]:
        return {domain: self.cache.kv_cache.page_store.used_pages(Tier.DEVICE, domain) for domain in DOMAINS}

    def pin(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Pins an adapter that is on the device."""
        digests = self.cache.adapters.digests
        if digests and len(self.pinned) < 3:
            self.pinned.append(digests[first % len(digests)])
            self.cache.adapters.pin(self.pinned[-1])

    def unpin(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if self.pinned:
            self.cache.adapters.unpin(self.pinned.pop(first % len(self.pinned)))

    def prune(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Deletes an adapter, and clears the list of wanted ones."""
        self.cache.adapters.wanted = ()
        idle = [digest for digest in self.cache.adapters.digests if digest not in self.pinned]
        if idle:
            self.cache.adapters.evict(idle[first % len(idle)])
