"""Measures how often running requests end, and which parts of the service the domains of each tier have got lately.

    EndRate        how many times a second one running request ends
    ServedShares   the fractions of requests and of prompt tokens that started for each tier and domain

Owns only counts. Never looks at the queue. Invariant: the fractions of all tiers and domains sum to 1.

What an engine with a queue has served lately is what it will serve next: a domain (usually one tenant) that always gets
its requests through at once, because it is below its fair share, goes on to pass those that wait.
"""

from dataclasses import dataclass

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.platform.ids import IsolationDomain

_STEPS_KEPT = 0.98
"""What a step still counts after each further step: the last 50 steps or so decide."""
_STARTS_KEPT = 0.99
"""What a start still counts after each further start: the last 100 starts or so decide."""
_NEGLIGIBLE = 0.01
"""A domain with a count below this is forgotten."""


class EndRate:
    """Learns from the latest steps how often a running request ends."""

    def __init__(self) -> None:
        self._request_seconds = self._ended = 0.0

    def record_step(self, seconds: float, num_requests: int) -> None:
        """Records a step of `num_requests` requests that took `seconds`."""
        self._request_seconds = self._request_seconds * _STEPS_KEPT + num_requests * seconds
        self._ended *= _STEPS_KEPT

    def record_finished(self) -> None:
        """Records that one request has ended with its last step."""
        self._ended += 1

    @property
    def per_second(self) -> float:
        """How many times a second one running request ends, in the mean. 0 if none has ended."""
        return self._ended / self._request_seconds if self._request_seconds else 0.0


@dataclass(slots=True)
class _Count:
    requests: float = 0.0
    tokens: float = 0.0
    at: int = 0
    """The number of starts when the count was last faded."""

    def fade(self, number: int) -> None:
        kept = _STARTS_KEPT ** (number - self.at)
        self.requests, self.tokens, self.at = self.requests * kept, self.tokens * kept, number


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of the requests and of the prompt tokens that have started, 0 to 1."""

    requests: float = 0.0
    tokens: float = 0.0

    def at_most(self, most: float) -> "Shares":
        return Shares(min(self.requests, most), min(self.tokens, most))


class ServedShares:
    """Counts what has started, by tier and domain (usually one tenant); later starts count more."""

    def __init__(self) -> None:
        self._counts: dict[tuple[ServiceTier, IsolationDomain], _Count] = {}
        self._number = 0

    def record_start(self, state: RequestState) -> None:
        """Records that a request starts, with the prompt tokens that it must compute."""
        self._number += 1
        count = self._counts.setdefault((state.request.tier, state.domain), _Count(at=self._number))
        count.fade(self._number)
        count.requests += 1
        count.tokens += max(state.num_uncomputed, 1)
        if self._number % 128 == 0:
            self._forget_idle()

    def of(self) -> dict[tuple[ServiceTier, IsolationDomain], Shares]:
        """Returns the present shares of all tiers and domains."""
        for count in self._counts.values():
            count.fade(self._number)
        requests = sum(count.requests for count in self._counts.values())
        tokens = sum(count.tokens for count in self._counts.values())
        return {key: Shares(count.requests / requests, count.tokens / tokens) for key, count in self._counts.items()}

    def _forget_idle(self) -> None:
        for count in self._counts.values():
            count.fade(self._number)
        self._counts = {key: count for key, count in self._counts.items() if count.requests >= _NEGLIGIBLE}
