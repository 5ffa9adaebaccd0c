"""When leases end, and which path is worth less from then on.

A drop order notices by itself when a page has become worth more, not when it has become worth less: it must be told.
A path is remembered by its last node, since at most one of its pages, the deepest on a tier, can be the next to go.
Invariant: what is remembered are the leases that have not ended; whoever asks for room asks here first.
"""

import heapq
from collections.abc import Iterator
from itertools import count

from graftwork.engine.prefix_tree import Node


class LeaseEnds:
    """Paths by the end of their leases."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = count()

    def add(self, until: float, last: Node) -> None:
        """The pages down to `last` have a lease until then."""
        heapq.heappush(self._ends, (until, next(self._numbers), last))

    def take_ended(self, now: float) -> Iterator[Node]:
        """The last nodes of paths whose leases have ended by `now`, each once."""
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[2]
