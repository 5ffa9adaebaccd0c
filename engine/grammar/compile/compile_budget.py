"""Limits the compile time of each isolation domain. A domain is a group of callers that may share cached KV.

The limit is a number of seconds in a minute. A domain gets its used seconds back evenly over the next minute.
"""

from collections import OrderedDict

from graftwork.platform.clock import Clock

_MAX_PARTIES = 4096


class CompileBudget:
    """Counts the seconds of compiling that each isolation domain has used.

    Only the 4,096 domains that compiled most recently are remembered. A forgotten domain counts as if it had used
    nothing.
    """

    def __init__(self, seconds_per_minute: float, clock: Clock) -> None:
        self._whole = seconds_per_minute
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By domain: the pair (used seconds, monotonic time at which this number was right)."""

    def charge(self, domain: str, seconds: float) -> None:
        """Adds the seconds of a finished compile to the used time of an isolation domain.

        The used time may then exceed the limit. In that case the domain must wait before it may compile again.
        """
        self._spent[domain] = (self._debt(domain) + seconds, self._clock.monotonic())
        self._spent.move_to_end(domain)
        while len(self._spent) > _MAX_PARTIES:
            self._spent.popitem(last=False)

    def seconds_until_credit(self, domain: str) -> float:
        """Returns how many seconds an isolation domain must wait before it may compile again. 0 if it may
        compile now.
        """
        return max(0.0, (self._debt(domain) - self._whole) * 60 / self._whole)

    def _debt(self, domain: str) -> float:
        spent, since = self._spent.get(domain, (0.0, 0.0))
        return max(0.0, spent - (self._clock.monotonic() - since) * self._whole / 60)
