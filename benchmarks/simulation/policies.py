"""The policies that are compared: what is done between turns, and which pages go first.

All of them run over the same tiers, the same mover and the same background offloader, and every session says when it
ends. They differ in the order in which pages are given up, and in what is done when a turn ends and a tool answers.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.eviction_queue import EvictionRank, Ranking
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.session_cache import LeaseModel
from graftwork.engine.kv.tool_latency import ToolLatencyModel
from graftwork.platform.clock import Clock


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to keep sessions' KV."""

    name: str
    ranking: Callable[[Clock], Ranking | None]
    """None is the engine's own."""
    advice: Callable[[], LeaseModel]
    holds: bool = True
    """HOLD at the end of a turn: its pages are copied down at once."""
    prefetches: bool = True
    """PREFETCH when the last of a session's tools begins to answer."""
    leases_every_pause: bool = False
    """Leases do not depend on what is waited for: people get one too."""


class FixedLease:
    """The same time for every tool."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def lease_s(self, domain: str, tools: Mapping[str, float | None]) -> float:
        return self._seconds

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        return 1.0

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Nothing is learnt."""

    def forget_domain(self, domain: str) -> None:
        """Nothing was learned."""


TTL_S = 300.0
"""As the shorter of the time-to-live that hosted APIs sell."""


def by_last_use(clock: Clock) -> Ranking:
    """The page used longest ago goes first."""

    def rank(node: Node, tier: Tier) -> EvictionRank:
        return 0, 0.0, node.last_used

    return rank


def by_lease_and_last_use(clock: Clock) -> Ranking:
    """Pages without a lease go first, then those with one; among each, the page used longest ago."""

    def rank(node: Node, tier: Tier) -> EvictionRank:
        is_leased = node.lease is not None and node.lease.until > clock.monotonic()
        return int(is_leased), 0.0, node.last_used

    return rank


def _of_the_engine(clock: Clock) -> None:
    return None


LRU = Policy("lru", by_last_use, lambda: FixedLease(0.0), holds=False, prefetches=False)
LRU_WITH_VERBS = Policy("lru, hold and prefetch", by_last_use, lambda: FixedLease(0.0))
TTL = Policy("ttl", by_lease_and_last_use, lambda: FixedLease(TTL_S), prefetches=False, leases_every_pause=True)
OURS = Policy("ours", _of_the_engine, ToolLatencyModel)
POLICIES = (LRU, TTL, LRU_WITH_VERBS, OURS)
