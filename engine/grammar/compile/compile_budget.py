"""Limits the seconds of compiling that each domain may use. Spent seconds come back evenly over a minute.

A domain is a group of callers that may share cached prefixes (see IsolationDomain).
"""

from collections import OrderedDict

from graftwork.platform.clock import Clock

_MAX_PARTIES = 4096


class CompileBudget:
    """Keeps the compile time that each domain has used up.

    A domain that has not compiled in the last minute has full credit and takes no memory.
    """

    def __init__(self, seconds_per_minute: float, clock: Clock) -> None:
        self._whole = seconds_per_minute
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By domain: (seconds that are spent, and the time at which that number was true)."""

    def charge(self, domain: str, seconds: float) -> None:
        """Charge a domain for a compile that has ended.

        Its credit may become negative; then it waits until it is positive.
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
