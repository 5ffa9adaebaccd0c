"""Ranks idle pages: the page with the lowest rank is evicted first.

Changes nothing. On the device, pages are evicted in this order of classes:

    REDUNDANT    no session's history contains the page, and a lower tier has a copy
    SUPERSEDED   sessions used the page, but their histories no longer contain it
    LAPSED       a session's history contains the page, no lease protects it, and a lower tier has a copy
    VALUED       all others, by expected loss: probability of reuse × seconds to bring the page back

On the host the classes are the same; the lower tier is the disk. All pages have the same size, so ranks
need no division by bytes. A lease raises a page's rank and never makes an allocation fail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.eviction_queue import EvictionRank
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.platform.clock import Clock

_REUSE_WITHOUT_LEASE = 0.1
"""The assumed probability that a page without a lease is used again. It only ranks such pages against leased ones."""


class EvictionClass(IntEnum):
    """The lowest class is evicted first."""

    REDUNDANT = 0
    SUPERSEDED = 1
    LAPSED = 2
    VALUED = 3


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Ranks pages from the state of the tree, the sessions, the disk and the clock."""

    clock: Clock
    costs: CostTracker
    page_tokens: int
    is_in_history: Callable[[PageKey], bool]
    """Whether the history of some session contains a page."""
    is_on_disk: Callable[[PageKey], bool]
    is_in_use: Callable[[Node], bool]
    """Returns whether a running request holds a page. Such a page is not superseded, even if no history contains it."""

    def rank(self, node: Node, tier: Tier) -> EvictionRank:
        """Returns a page's rank among the pages of a tier."""
        eviction_class = self.eviction_class(node, tier)
        value = self._value(node, tier) if eviction_class is EvictionClass.VALUED else 0.0
        return eviction_class, value, node.last_used

    def eviction_class(self, node: Node, tier: Tier) -> EvictionClass:
        """Returns a page's class; see the module's table."""
        if not node.outlives_sessions and not self.is_in_history(node.key) and not self.is_in_use(node):
            return EvictionClass.SUPERSEDED
        if not self.has_copy_below(node, tier):
            return EvictionClass.VALUED
        if node.outlives_sessions and not self.is_in_history(node.key):
            return EvictionClass.REDUNDANT
        return EvictionClass.VALUED if tier is Tier.DEVICE and self._is_leased(node) else EvictionClass.LAPSED

    def has_copy_below(self, node: Node, tier: Tier) -> bool:
        """Returns whether a lower tier has a copy, so that eviction loses nothing."""
        return (tier is Tier.DEVICE and node.host is not None) or self.is_on_disk(node.key)

    def _value(self, node: Node, tier: Tier) -> float:
        lease = node.lease
        probability = lease.return_probability if lease is not None and self._is_leased(node) else _REUSE_WITHOUT_LEASE
        cost = self.costs.cost
        if self.has_copy_below(node, tier):
            on_host = tier is Tier.DEVICE and node.host is not None
            return probability * cost.of_tier(Tier.HOST if on_host else Tier.DISK).page_s
        return probability * cost.prefill.seconds(self.page_tokens, node.depth * self.page_tokens)

    def _is_leased(self, node: Node) -> bool:
        return node.lease is not None and node.lease.until > self.clock.monotonic()
