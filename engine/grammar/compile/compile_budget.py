"""Limits how many seconds of compiling each isolation domain may use. Used seconds are given back evenly over a minute.

A domain is a group of callers that may share cached prefixes (see IsolationDomain).
"""

from collections import OrderedDict

from graftwork.platform.clock import Clock

_MAX_PARTIES = 4096


class CompileBudget:
    """Keeps the compile time that each domain has used.

    Remembers only the 4,096 domains that were charged last. All other domains have used nothing.
    """

    def __init__(self, seconds_per_minute: float, clock: Clock) -> None:
        self._whole = seconds_per_minute
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By domain: the pair (used seconds, monotonic time at which this number was right)."""

    def charge(self, domain: str, seconds: float) -> None:
        """Charges a domain for a compile that has ended.

        The used time may exceed the limit. Then the domain must wait until the excess is given back.
        """
        self._spent[domain] = (self._debt(domain) + seconds, self._clock.monotonic())
        self._spent.move_to_end(domain)
        while len(self._spent) > _MAX_PARTIES:
            self._spent.popitem(last=False)

    def seconds_until_credit(self, domain: str) -> float:
        """Returns the seconds until the domain may compile again: 0 if it may compile now."""
        return max(0.0, (self._debt(domain) - self._whole) * 60 / self._whole)

    def _debt(self, domain: str) -> float:
        spent, since = self._spent.get(domain, (0.0, 0.0))
        return max(0.0, spent - (self._clock.monotonic() - since) * self._whole / 60)
