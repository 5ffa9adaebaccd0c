"""Copies that take simulated time, and a disk of names.

Owns one channel for each direction between two tiers: plans go through it one after the other, at its bandwidth.
Invariant: what was begun is reported once, and until then nobody else moves the same page the same way.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

from benchmarks.simulation.hardware import ScaledHardware
from benchmarks.simulation.timeline import Timeline

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.index import NO_OBJECTS, DiskCounters, ObjectFigures
from graftwork.engine.kv.index.cost_model import TransferCost
from graftwork.engine.kv.index.radix_tree import Domain, Node
from graftwork.engine.kv.transfer.plan import TransferDone, TransferKind, TransferPlan


class SimulatedDisk:
    """Pages by key, of which the one used longest ago goes when there is no room."""

    def __init__(self, max_pages: int, page_bytes: int) -> None:
        self._max_pages = max_pages
        self._page_bytes = page_bytes
        self._pages: OrderedDict[PageKey, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def bytes_used(self) -> int:
        return len(self._pages) * self._page_bytes

    @property
    def counters(self) -> DiskCounters:
        return DiskCounters()

    @property
    def objects(self) -> ObjectFigures:
        return NO_OBJECTS

    def holds(self, key: PageKey) -> bool:
        return key in self._pages

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        raise NotImplementedError("nothing is encrypted in a simulation")

    def forget(self, key: PageKey) -> None:
        self._pages.pop(key, None)

    def forget_domain(self, domain: bytes) -> int:
        raise NotImplementedError("no domain is given up in a simulation")

    def write(self, key: PageKey) -> None:
        """Keep a page, at the cost of the oldest."""
        self._pages[key] = None
        self._pages.move_to_end(key)
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)

    def read(self, key: PageKey) -> bool:
        """Whether a page is there; it is used now."""
        if key not in self._pages:
            return False
        self._pages.move_to_end(key)
        return True


class SimulatedCopies:
    """A CopyEngine without bytes."""

    def __init__(self, timeline: Timeline, hardware: ScaledHardware, disk: SimulatedDisk) -> None:
        self.report: Callable[[TransferDone], None] = _nobody
        self.moved_pages: dict[TransferKind, int] = dict.fromkeys(TransferKind, 0)
        self._timeline = timeline
        self._disk = disk
        self._costs: dict[TransferKind, TransferCost] = {
            TransferKind.SAVE: hardware.save,
            TransferKind.LOAD: hardware.costs.host,
            TransferKind.STORE: hardware.store,
            TransferKind.FETCH: hardware.costs.disk,
        }
        self._free_at = dict.fromkeys(TransferKind, 0.0)
        self._saving: Counter[Domain] = Counter()
        self._moving: set[tuple[TransferKind, Node]] = set()

    @property
    def num_under_way(self) -> int:
        """Pages that move."""
        return len(self._moving)

    def saving_pages(self, domain: Domain) -> int:
        """Pages of a domain that are on their way to the host."""
        return self._saving[domain]

    def begin(self, plan: TransferPlan) -> None:
        """Put a plan behind those of its channel."""
        moving = {(plan.kind, node) for node in plan.nodes}
        assert not moving & self._moving, "a page is on its way twice"
        self._moving |= moving
        self._saving[plan.domain] += len(plan.nodes) * (plan.kind is TransferKind.SAVE)
        seconds = self._costs[plan.kind].seconds(len(plan.moves))
        ends_at = max(self._free_at[plan.kind], self._timeline.now) + seconds
        self._free_at[plan.kind] = ends_at
        self._timeline.after(ends_at - self._timeline.now, lambda: self._end(plan, seconds))

    def sweep(self) -> None:
        """What is forgotten is gone at once."""

    def close(self) -> None:
        """Nothing runs by itself."""

    def _end(self, plan: TransferPlan, seconds: float) -> None:
        self._moving -= {(plan.kind, node) for node in plan.nodes}
        self._saving[plan.domain] -= len(plan.nodes) * (plan.kind is TransferKind.SAVE)
        num_good = self._carry_out(plan)
        self.moved_pages[plan.kind] += num_good
        self.report(TransferDone(plan, num_good, seconds))

    def _carry_out(self, plan: TransferPlan) -> int:
        """Returns how many moves succeed, from the first."""
        if plan.kind is TransferKind.STORE:
            for move in plan.moves:
                self._disk.write(move.key)
        if plan.kind is not TransferKind.FETCH:
            return len(plan.moves)
        return _count_while(self._disk.read, plan)


def _count_while(is_good: Callable[[PageKey], bool], plan: TransferPlan) -> int:
    for number, move in enumerate(plan.moves):
        if not is_good(move.key):
            return number
    return len(plan.moves)


def _nobody(done: TransferDone) -> None:
    raise AssertionError(f"nobody takes the end of a {done.plan.kind}")
