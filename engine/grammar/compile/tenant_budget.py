"""Seconds of compiling that each domain may use: credit that is spent at once and comes back over a minute."""

from collections import OrderedDict

from graftwork.platform.clock import Clock

_MAX_PARTIES = 4096


class CompileBudget:
    """Credit by domain; who has never compiled, or long ago, has all of it and takes no memory."""

    def __init__(self, seconds_per_minute: float, clock: Clock) -> None:
        self._whole = seconds_per_minute
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(seconds spent, when that was so)"""

    def charge(self, domain: str, seconds: float) -> None:
        """A compile has ended; it may spend more than there was, and is waited off then."""
        self._spent[domain] = (self._debt(domain) + seconds, self._clock.monotonic())
        self._spent.move_to_end(domain)
        while len(self._spent) > _MAX_PARTIES:
            self._spent.popitem(last=False)

    def seconds_until_credit(self, domain: str) -> float:
        """0 where it may compile now."""
        return max(0.0, (self._debt(domain) - self._whole) * 60 / self._whole)

    def _debt(self, domain: str) -> float:
        spent, since = self._spent.get(domain, (0.0, 0.0))
        return max(0.0, spent - (self._clock.monotonic() - since) * self._whole / 60)
