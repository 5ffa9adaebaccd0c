"""Counts what happened in the last minutes: totals and rates, and percentiles of durations.

    WindowCounts   counts by key over a window of time, in slices
    bucket_of      the bucket of a duration, and `percentile` reads a duration back

Never reads a clock: the caller gives the time. A window is exact to one slice. Reading it costs nothing per slice,
because the sum over all slices is kept while slices come and go.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from typing import Any

WINDOW_S = 300.0
"""The seconds that a window covers."""
_SLICE_S = 5.0
_SLICES = int(WINDOW_S / _SLICE_S)
_RATE_SLICES = 3
"""A rate is that of so many slices, of which the last is not over yet: 10 to 15 seconds."""
_SHORTEST_S = 1e-4
_STEP = math.log(1.1)
"""Two neighbouring buckets of durations differ by 10 %, so a percentile is exact to 5 %."""


def bucket_of(seconds: float) -> int:
    """Returns the number of the bucket of a duration in seconds. All below 0.1 ms are in bucket 0."""
    return 0 if seconds <= _SHORTEST_S else round(math.log(seconds / _SHORTEST_S) / _STEP)


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Returns the duration in seconds that `share` of the counted durations do not exceed. None if there are none.

    `counts` maps buckets to numbers of durations. `share` is above 0 and up to 1.
    """
    wanted = math.ceil(share * sum(counts.values()))
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted > 0:
            return _SHORTEST_S * math.exp(bucket * _STEP)
    return None


class WindowCounts:
    """Counts by key in the last `WINDOW_S` seconds. All methods take the present time on one monotonic clock."""

    __slots__ = ("_by_kind", "_last", "_slices", "_started_at", "totals")

    def __init__(self, now: float) -> None:
        self.totals: Counter[Hashable] = Counter()
        """The sum over the window, by key, as of the latest call. A key without counts is missing."""
        self._slices: deque[tuple[int, Counter[Hashable]]] = deque()
        self._last: Counter[Hashable] = Counter()
        """The counts of the slice that is not over yet."""
        self._started_at = now
        self._by_kind: dict[Hashable, dict[Hashable, int]] | None = None
        """The totals of keys `(kind, name)`, by both; None since the totals have changed."""

    def add(self, key: Hashable, now: float, amount: int = 1) -> None:
        """Adds `amount` to the count of `key`."""
        self.advance(now)
        self._by_kind = None
        self.totals[key] += amount
        self._last[key] += amount

    def advance(self, now: float) -> None:
        """Drops the slices that have left the window."""
        number = int(now // _SLICE_S)
        if self._slices and self._slices[-1][0] == number:
            return
        self._last = Counter()
        self._slices.append((number, self._last))
        while self._slices[0][0] <= number - _SLICES:
            self.totals -= self._slices.popleft()[1]  # drops the keys whose counts become 0
            self._by_kind = None

    def per_second(self, key: Hashable, now: float) -> float:
        """Returns the rate of `key` in the last 10 to 15 seconds, or since the first call if that is shorter."""
        self.advance(now)
        number = int(now // _SLICE_S)
        recent = sum(counts[key] for each, counts in reversed(self._slices) if each > number - _RATE_SLICES)
        since = max((number - _RATE_SLICES + 1) * _SLICE_S, self._started_at)
        return recent / max(now - since, 1.0)

    def of_kind(self, kind: str) -> Mapping[Any, int]:
        """Returns the totals of the keys `(kind, name)` by name, as of the latest call. The caller must not change them."""
        if self._by_kind is None:
            self._by_kind = {}
            for key, count in self.totals.items():
                if isinstance(key, tuple):
                    self._by_kind.setdefault(key[0], {})[key[1]] = count
        return self._by_kind.get(kind, {})

    def __bool__(self) -> bool:
        """Whether anything is counted in the window, as of the latest call."""
        return bool(self.totals)
