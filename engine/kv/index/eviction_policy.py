"""What a cached page is worth: the order in which a tier gives its idle pages up.

On the device, first to last:

    REDUNDANT        nobody's session is_in_history it, and a copy stands below
    SUPERSEDED   sessions have moved away from it
    LAPSED       a session is_in_history it, its lease is over or was never given, and a copy stands below
    VALUED       the rest, by expected loss: chance that it is wanted again × seconds to have it back

On the host the same, where "a copy stands below" means on disk. All pages have the same bytes, so value per byte is
value. A lease only raises a page's rank: it never makes an allocation fail.
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

_CHANCE_WITHOUT_LEASE = 0.1
"""That a page which no session has leased is wanted again; only its order against leased ones matters."""


class EvictionClass(IntEnum):
    """First to go first."""

    REDUNDANT = 0
    SUPERSEDED = 1
    LAPSED = 2
    VALUED = 3


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Ranks idle pages. Reads the clock, and changes nothing."""

    clock: Clock
    costs: CostTracker
    page_tokens: int
    is_in_history: Callable[[PageKey], bool]
    """Whether a session's history runs through a page."""
    is_on_disk: Callable[[PageKey], bool]
    is_in_use: Callable[[Node], bool]
    """Whether a running sequence holds a page: nobody has left it, though no history may run through it yet."""

    def rank(self, node: Node, tier: Tier) -> EvictionRank:
        """The place of a page in the order of its tier; the lowest goes first."""
        eviction_class = self.eviction_class(node, tier)
        value = self._value(node, tier) if eviction_class is EvictionClass.VALUED else 0.0
        return eviction_class, value, node.last_used

    def eviction_class(self, node: Node, tier: Tier) -> EvictionClass:
        """Which of the four kinds a page is."""
        if not node.outlives_sessions and not self.is_in_history(node.key) and not self.is_in_use(node):
            return EvictionClass.SUPERSEDED
        if not self.has_copy_below(node, tier):
            return EvictionClass.VALUED
        if node.outlives_sessions and not self.is_in_history(node.key):
            return EvictionClass.REDUNDANT
        return EvictionClass.VALUED if tier is Tier.DEVICE and self._is_leased(node) else EvictionClass.LAPSED

    def has_copy_below(self, node: Node, tier: Tier) -> bool:
        """Whether dropping the tier's copy loses nothing."""
        return (tier is Tier.DEVICE and node.host is not None) or self.is_on_disk(node.key)

    def _value(self, node: Node, tier: Tier) -> float:
        lease = node.lease
        chance = lease.chance if lease is not None and self._is_leased(node) else _CHANCE_WITHOUT_LEASE
        cost = self.costs.cost
        if self.has_copy_below(node, tier):
            on_host = tier is Tier.DEVICE and node.host is not None
            return chance * cost.of_tier(Tier.HOST if on_host else Tier.DISK).page_s
        return chance * cost.prefill.seconds(self.page_tokens, node.depth * self.page_tokens)

    def _is_leased(self, node: Node) -> bool:
        return node.lease is not None and node.lease.until > self.clock.monotonic()
