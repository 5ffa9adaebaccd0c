"""One simulated engine under one policy, with the engine's own pools, tree, mover and policy.

Only the clock, the device and the bytes are made up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.agent_traces import Trace
from benchmarks.simulation.agents import Agents, Budget, Surroundings
from benchmarks.simulation.copies import SimulatedCopies, SimulatedDisk
from benchmarks.simulation.hardware import ScaledHardware
from benchmarks.simulation.policies import Policy
from benchmarks.simulation.reserve_watch import ReserveWatch
from benchmarks.simulation.serving import Server
from benchmarks.simulation.tally import Figures
from benchmarks.simulation.timeline import Timeline

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.session_cache import SessionCache

WARM_UP = 0.15
"""Of all turns: those in which the tiers fill are not counted."""
STARTS_WITHIN_S = 1200.0
"""The first sessions come one after the other in this time."""


@dataclass(frozen=True, slots=True)
class Load:
    """Who comes: sessions of a trace, one after the other, so that `num_live` of them are there at any time."""

    trace: Trace
    num_live: int
    num_turns: int


class World:
    """Runs once."""

    def __init__(self, policy: Policy, load: Load, hardware: ScaledHardware) -> None:
        self.timeline = Timeline()
        self.disk = SimulatedDisk(hardware.disk_pages, hardware.sizes.page_bytes)
        self.copies = SimulatedCopies(self.timeline, hardware, self.disk)
        lower = LowerTiers(self.copies, CostTracker(hardware.costs), self.disk)
        clock = self.timeline.clock
        self.kv_cache = KvCacheManager(hardware.sizes, lower, clock, policy.ranking(clock))
        scopes = CacheScopes("sha256:simulated", "bfloat16")
        session_cache = SessionCache(self.kv_cache, scopes, policy.advice(), clock)
        domains = sorted({session.domain.encode() for session in load.trace.sessions})
        self.watch = ReserveWatch(self.kv_cache.page_store, domains, self.copies.saving_pages)
        self.server = Server(self.kv_cache, session_cache, hardware, self.timeline, self.watch)
        self.server.tally.num_warm_up = int(WARM_UP * load.num_turns)
        self.copies.report = self.server.absorb
        self._load = load
        surroundings = Surroundings(self.server, session_cache, scopes, self.timeline, self.watch)
        self._agents = Agents(load.trace, policy, surroundings, Budget(load.num_turns))
        self._roots: Iterator[int] = (one.number for one in load.trace.sessions if one.parent is None)

    def run(self) -> Figures:
        """Everybody comes, takes turns, and leaves; nothing is left."""
        for number in range(self._load.num_live):
            self.timeline.after(STARTS_WITHIN_S * number / self._load.num_live, self._begin)
        self.timeline.run()
        self.check_empty()
        return self.server.tally.figures(
            self.copies.moved_pages,
            self.kv_cache.page_store.sizes.page_bytes,
            self.kv_cache.page_store.device.num_pages,
        )

    def _begin(self) -> None:
        """The next session of the trace comes, and after it another, as long as turns are left."""
        number = next(self._roots, None)
        if number is not None and self._agents.budget.turns:
            self._agents.start(number, self._begin)

    def check_empty(self) -> None:
        """No page is held, cached or under way anywhere, and nothing was miscounted."""
        self.kv_cache.check_integrity()
        assert self._agents.num_live == 0, "a session has not ended"
        assert self.copies.num_under_way == 0, "a copy has not ended"
        assert self.disk.num_pages == 0, f"{self.disk.num_pages} pages are left on disk"
        assert len(self.kv_cache.sessions) == 0, "a session is remembered"
        for tier in (Tier.DEVICE, Tier.HOST):
            pool = self.kv_cache.page_store.pool(tier)
            assert pool.free_pages == pool.num_pages, f"{pool.num_pages - pool.free_pages} pages of the {tier} leaked"
