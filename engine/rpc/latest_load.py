"""Keeps what one engine has said last with its load, and counts what this gateway has sent to it since.

Owns both, by any key, such as a line of the queue or a domain (usually one tenant). Decides nothing: forecasts.py and
queue_rooms.py do. It is for one event loop. A load is decoded only when a request asks for it.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable

T = TypeVar("T")

_ON_THE_WAY_S = 0.02
"""A request that is sent may be in no load that was made within so many seconds after it."""
_COMING_S = 0.1
"""A request that has passed before its prompt was read is expected for so many seconds."""


class Sent(NamedTuple):
    """Requests that were sent to an engine."""

    requests: int = 0
    tokens: int = 0
    """Of their prompts."""


class SentRequests:
    """Counts the requests that were sent to an engine and that its latest load cannot know, by any key, and those that will
    be sent when their prompts are read.
    """

    def __init__(self) -> None:
        self._each: deque[tuple[float, str, int]] = deque()
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._coming: dict[str, deque[float]] = {}
        """When each request was expected first that has not come, by key."""

    def of(self, key: str, now: float) -> Sent:
        """Returns the requests of a key, with those that are expected to come. Nothing is known of their prompts."""
        coming = self._coming.get(key)
        while coming and now - coming[0] > _COMING_S:
            coming.popleft()
        return Sent(self._requests[key] + len(coming or ()), self._tokens[key])

    def expect(self, at: float, key: str) -> None:
        """Expects a request that has passed at this time, on the gateway's clock. It is expected for a moment only."""
        self._coming.setdefault(key, deque()).append(at)

    def come(self, key: str) -> None:
        """Expects one request less, if any was expected: one has come, and is decided about or added."""
        coming = self._coming.get(key)
        if coming:
            coming.popleft()
        if not coming:
            self._coming.pop(key, None)

    def add(self, at: float, key: str, tokens: int) -> None:
        """Adds a request with so many prompt tokens, which is sent at a time on the gateway's clock."""
        self._each.append((at, key, tokens))
        self._count(key, 1, tokens)

    def remove(self, key: str, tokens: int) -> float | None:
        """Takes back a request that the engine has refused. Returns when it was sent; None if it is not counted any more."""
        for place, (at, other, size) in enumerate(self._each):
            if (other, size) == (key, tokens):
                del self._each[place]
                self._count(key, -1, -tokens)
                return at
        return None

    def forget_before(self, made_at: float) -> None:
        """Forgets the requests that a load knows which was made at this time."""
        while self._each and self._each[0][0] < made_at - _ON_THE_WAY_S:
            _, key, tokens = self._each.popleft()
            self._count(key, -1, -tokens)
        expected = self._coming.items()
        self._coming = {key: times for key, times in expected if times and made_at - times[-1] <= _COMING_S}

    def _count(self, key: str, requests: int, tokens: int) -> None:
        self._requests[key] += requests
        self._tokens[key] += tokens
        if not self._requests[key]:
            del self._requests[key], self._tokens[key]


class LatestWord(Generic[T]):
    """What an engine has said last about each key, as far as it is believed."""

    def __init__(self, clock: Clock, read: Callable[[EngineLoad], Mapping[str, T]], believed_s: float) -> None:
        """`read` returns what a load says by key; it raises ValueError if the load has too few figures. A load is believed
        for `believed_s` seconds from when it was so.
        """
        self._clock = clock
        self._read = read
        self._believed_s = believed_s
        self._unread: LoadReport | None = None
        self._by_key: dict[str, T] = {}
        self.made_at = -math.inf
        """When the latest load was so, in seconds of the clock. Before it is read, when it came."""
        self.sent = SentRequests()

    def note(self, report: LoadReport) -> None:
        """Takes a report that has just come."""
        self._unread, self.made_at = report, self._clock.monotonic()
        self.sent.forget_before(self.made_at - self._believed_s)

    def by_key(self) -> dict[str, T]:
        """Returns what the latest load says; nothing if nobody can read it, or if it is too old."""
        if self._unread is not None:
            report, self._unread, self._by_key = self._unread, None, {}
            with suppress(Unavailable, ValueError):
                load = report.read()
                self.made_at -= load.age_s
                self._by_key = dict(self._read(load))
            self.sent.forget_before(self.made_at)
        return self._by_key if self._clock.monotonic() - self.made_at <= self._believed_s else {}
