"""The sessions and requests of random operations on a KV cache, and what their pages must hold."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.page_windows import PageWindows, window_key
from graftwork.engine.kv.transfer.loader import PageAllocation, TokenPath
from tests.engine.tagged_kv_cache import TaggedKvCache

OPERATIONS = [
    *[
        "open",
        "request_without_session",
        "cancel",
        "offload",
        "fork",
        "rewind",
        "close",
        "limit",
        "wait",
        "tick",
        "restart",
        "forget_domain",
    ],
    *["turn"] * 5,
    *["finish"] * 6,
    *["end_copy"] * 5,
    *["command"] * 2,
    *["place_adapters"] * 5,
    *["pin", "unpin", "prune", "prune", "compute"],
]
"""Each name appears as often as its weight."""


@dataclass(eq=False)
class ExpectedSession:
    """The expected state of a session."""

    name: str
    domain: bytes
    tokens: tuple[int, ...] = ()
    past: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(eq=False)
class RunningRequest:
    """A request that holds pages."""

    agent: ExpectedSession | None
    path: TokenPath
    allocation: PageAllocation
    is_computed: bool = False

    @property
    def frames(self) -> list[PageId]:
        """The pages of all layer groups."""
        windows = self.allocation.windows
        return [*self.allocation.pages, *(() if windows is None else windows.all_frames)]


def check_windows(cache: TaggedKvCache, one: RunningRequest, num_written: int) -> None:
    """Checks that the windowed pages of a request contain what it found or wrote, and that all that the next query sees
    are there.
    """
    windows, tags = one.allocation.windows, cache.tags(one.path)
    kept = cache.kv_cache.page_store.sizes.windows
    if windows is None or kept is None:
        return
    on_device = cache.copies.tags[Tier.DEVICE]
    first_seen = max(num_written * cache.size - kept.window + 1, 0) // cache.size
    assert windows.first <= first_seen, "a windowed page that the next query sees is gone"
    for index, frames in enumerate(windows.frames[: max(num_written - windows.first, 0)], start=windows.first):
        for group, frame in enumerate(frames):
            assert on_device[frame] == window_key(tags[index], group), "a windowed page holds something else"


def seen_pages(num_tokens: int, page_tokens: int, rolling: RollingWindow) -> set[int]:
    """Returns the pages before position `num_tokens` that a query there sees, token by token."""
    tokens = (one for one in range(num_tokens) if one < rolling.sinks or one > num_tokens - rolling.window)
    return {one // page_tokens for one in tokens}


def needed_keys(
    tags: Sequence[PageKey], windows: PageWindows | None, rolling: RollingWindow | None, page_tokens: int
) -> set[PageKey]:
    """Returns the keys of all pages that a request needs to go on after the pages with these tags."""
    if rolling is not None:
        widest = max(rolling.window, 0 if windows is None else windows.window)  # layers with a window keep their own
        kept = seen_pages(len(tags) * page_tokens, page_tokens, RollingWindow(rolling.sinks, widest))
        tokens = {tags[page] for page in kept}
    else:
        tokens = set(tags)
    if windows is None:
        return tokens
    next_token = len(tags) * windows.page_tokens
    seen = {token // windows.page_tokens for token in range(max(next_token - windows.window + 1, 0), next_token)}
    groups = range(windows.num_groups)
    return tokens | {*(window_key(tags[page], group) for page in seen for group in groups)}


def check_prompt_leases(cache: TaggedKvCache) -> bool:
    """Checks that the leases of prompts protect no more pages of a domain than its reserve. Returns whether there are any.

    The leases of sessions have the probabilities 0.9 and 1.0.
    """
    kv_cache, now = cache.kv_cache, cache.clock.monotonic()
    nodes = {node for tier in (Tier.DEVICE, Tier.HOST) for node in kv_cache.page_store.tree.nodes_on(tier)}
    leases = [(node.domain, node.lease) for node in nodes if node.lease is not None and node.lease.until > now]
    kept = Counter(domain for domain, lease in leases if lease.return_probability not in (0.9, 1.0))
    for domain, number in kept.items():
        assert number <= kv_cache.prompt_leases.num_pages(domain) <= kv_cache.page_store.reserve_pages(Tier.DEVICE)
    return bool(kept)


def check_limits(cache: TaggedKvCache, domain: bytes) -> bool:
    """Checks that no page of the device which could be evicted is above a limit that was just enforced for a domain.

    Returns whether the domain shares a limit with another one.
    """
    page_store = cache.kv_cache.page_store
    limits = page_store.limits.of(domain)
    for limit in limits:
        left = page_store.excess_pages(Tier.DEVICE, limit)
        page_store.enforce_limit(Tier.DEVICE, limit)
        assert left == page_store.excess_pages(Tier.DEVICE, limit), "a page that can be evicted is above a limit"
    return any(len(limit.domains) > 1 for limit in limits)
