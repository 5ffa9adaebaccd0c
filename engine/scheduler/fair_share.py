"""Who goes next: service tier first, then fair share, with ageing so that nothing starves.

Within a tier, each party has a virtual counter of service received, over its weight; the smallest goes first.
A party that arrives at an empty queue of its own is lifted to the smallest counter of those that wait (or to the
last that was served), so that idling earns no credit.
Source: Virtual Token Counter, Sheng et al. 2024 (arXiv 2401.00588).
"""

from collections import deque
from collections.abc import Iterator

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.request_state import Sequence
from graftwork.platform.clock import Clock

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
_TIER_RANK = {ServiceTier.PRIORITY: 0, ServiceTier.DEFAULT: 1, ServiceTier.FLEX: 2}


class FairShare:
    """The waiting sequences, in the order in which they deserve the next place."""

    def __init__(self, clock: Clock, seconds_per_tier: float = 10.0) -> None:
        """A request that has waited `seconds_per_tier` is treated as one tier higher, and so on."""
        self._clock = clock
        self._seconds_per_tier = seconds_per_tier
        self._waiting: dict[str, deque[Sequence]] = {}
        self._counters: dict[str, float] = {}
        self._last_served = 0.0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._waiting.values():
            yield from queue

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its party's line within its tier."""
        share = sequence.request.share
        if share not in self._waiting:
            floor = min((self._counters[other] for other in self._waiting), default=self._last_served)
            self._counters[share] = max(self._counters.get(share, 0.0), floor)
            self._waiting[share] = deque()
        self._waiting[share].append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out: it is admitted, cancelled or refused."""
        share = sequence.request.share
        self._waiting[share].remove(sequence)
        if not self._waiting[share]:
            del self._waiting[share]

    def candidates(self) -> list[Sequence]:
        """Everyone who waits, in order: the next one to admit stands first."""
        ranks = {sequence.request_id: self.rank(sequence) for sequence in self}

        def order(sequence: Sequence) -> tuple[int, float, float]:
            return ranks[sequence.request_id], self._counters[sequence.request.share], sequence.arrived_at

        return sorted(self, key=order)

    def rank(self, sequence: Sequence) -> int:
        """The class that a sequence has by now, 0 for the highest: waiting lifts it."""
        promotions = int((self._clock.monotonic() - sequence.arrived_at) / self._seconds_per_tier)
        return max(_TIER_RANK[sequence.request.tier] - promotions, 0)

    def charge_input(self, sequence: Sequence, uncached_tokens: int) -> None:
        """Charge the prompt tokens that must be computed."""
        self._charge(sequence, INPUT_PRICE * uncached_tokens)

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge tokens that were generated."""
        self._charge(sequence, OUTPUT_PRICE * num_tokens)

    def _charge(self, sequence: Sequence, price: float) -> None:
        share = sequence.request.share
        self._counters[share] = self._counters.get(share, self._last_served) + price / sequence.request.weight
        self._last_served = self._counters[share]
