"""Ranks idle pages for eviction.

On the device the classes of pages are evicted in this order:

    REDUNDANT    a request without a session used the page, no session's history contains it, a lower tier has a copy,
                 and no lease protects the page. Also the page of a windowed layer group before the end of all prompts,
                 and a page at the end of a prompt whose windowed pages are gone
    SUPERSEDED   only sessions used the page, and no session's history contains it any more
    LAPSED       a session's history contains the page, a lower tier has a copy, and no lease protects the page
    VALUED       all other pages, ordered by expected loss: probability of reuse × seconds to bring the page back

On the host, the lower tier is the disk, and a lease does not change a page's class. A lease protects the pages of a
session or a prompt for a limited time: it raises their rank. Leased pages can still be evicted, so a lease never makes
an allocation fail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.eviction_queue import EvictionRank
from graftwork.engine.kv.index.page_windows import window_key
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.platform.clock import Clock

_REUSE_WITHOUT_LEASE = 0.1
"""The assumed probability that a page without a lease is used again. It is needed only to compare such pages with
leased ones.
"""


class EvictionClass(IntEnum):
    """The class of a page for eviction. All pages of a lower class are evicted before pages of a higher class.

    The module docstring defines the classes.
    """

    REDUNDANT = 0
    SUPERSEDED = 1
    LAPSED = 2
    VALUED = 3


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Computes the eviction rank of a page from its copies on lower tiers, its lease, and its use by sessions."""

    clock: Clock
    costs: CostTracker
    page_tokens: int
    is_in_history: Callable[[PageKey], bool]
    """Returns whether the history of at least one session contains the page with this key."""
    is_on_disk: Callable[[PageKey], bool]
    is_in_use: Callable[[Node], bool]
    """Returns whether a running request holds a page. Such a page is not superseded, even if no history contains it."""
    has_windows: bool = False
    """Whether the model has windowed layer groups."""

    def rank(self, node: Node, tier: Tier) -> EvictionRank:
        """Returns the eviction rank of a node's page on `tier`. The page with the lowest rank is evicted first."""
        eviction_class = self.eviction_class(node, tier)
        value = self._value(node, tier) if eviction_class is EvictionClass.VALUED else 0.0
        return eviction_class, value, node.last_used

    def eviction_class(self, node: Node, tier: Tier) -> EvictionClass:
        """Returns the eviction class of a node's page on `tier`. The module docstring defines the classes."""
        page, is_window = node.owner, node.window_group is not None
        if (is_window and not node.is_tail) or (self.has_windows and self._leads_nowhere(node)):
            return EvictionClass.REDUNDANT
        if not page.outlives_sessions and not self.is_in_history(page.key) and (is_window or not self.is_in_use(page)):
            return EvictionClass.SUPERSEDED
        if not self.has_copy_below(node, tier) or (tier is Tier.DEVICE and self._is_leased(node)):
            return EvictionClass.VALUED
        is_only_shared = page.outlives_sessions and not self.is_in_history(page.key)
        return EvictionClass.REDUNDANT if is_only_shared else EvictionClass.LAPSED

    def _leads_nowhere(self, node: Node) -> bool:
        """Returns whether no prompt can continue after a page of tokens: no page follows it, and the pages of windowed
        layer groups beside it are gone.
        """
        if node.window_group is not None or node.first_child is not None or node.is_apart:
            return False
        return not self.is_on_disk(window_key(node.key, 0))

    def has_copy_below(self, node: Node, tier: Tier) -> bool:
        """Returns whether a tier below `tier` has a copy of the node's page, so that eviction from `tier` loses
        nothing.
        """
        return (tier is Tier.DEVICE and node.host is not None) or self.is_on_disk(node.key)

    def _value(self, node: Node, tier: Tier) -> float:
        lease = node.owner.lease
        probability = lease.return_probability if lease is not None and self._is_leased(node) else _REUSE_WITHOUT_LEASE
        cost = self.costs.cost
        if self.has_copy_below(node, tier):
            on_host = tier is Tier.DEVICE and node.host is not None
            return probability * cost.of_tier(Tier.HOST if on_host else Tier.DISK).page_s
        return probability * cost.prefill.seconds(self.page_tokens, node.depth * self.page_tokens)

    def _is_leased(self, node: Node) -> bool:
        lease = node.owner.lease
        return lease is not None and lease.until > self.clock.monotonic()
