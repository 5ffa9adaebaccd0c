"""Limits the seconds of compiling that each domain may use. Spent seconds come back evenly over a minute."""

from collections import OrderedDict

from graftwork.platform.clock import Clock

_MAX_PARTIES = 4096


class CompileBudget:
    """The credit of each domain. A domain that has not compiled in the last minute has full credit and takes no memory."""

    def __init__(self, seconds_per_minute: float, clock: Clock) -> None:
        self._whole = seconds_per_minute
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By domain: (seconds spent, at which time)."""

    def charge(self, domain: str, seconds: float) -> None:
        """Charge an ended compile. The credit may become negative; then the domain waits until it is positive again."""
        self._spent[domain] = (self._debt(domain) + seconds, self._clock.monotonic())
        self._spent.move_to_end(domain)
        while len(self._spent) > _MAX_PARTIES:
            self._spent.popitem(last=False)

    def seconds_until_credit(self, domain: str) -> float:
        """Seconds until the domain may compile again. 0 if it may now."""
        return max(0.0, (self._debt(domain) - self._whole) * 60 / self._whole)

    def _debt(self, domain: str) -> float:
        spent, since = self._spent.get(domain, (0.0, 0.0))
        return max(0.0, spent - (self._clock.monotonic() - since) * self._whole / 60)
