"""Measures a simulated run: latencies, service by tenant, and how far the service of backlogged tenants drifts apart.

Counts service by itself, from the outputs of requests, so that a policy with wrong counters is found out.
A tenant is backlogged at a step if requests of it still wait after admission. Service is in input tokens: an uncached
prompt token costs 1, a generated token costs 2 (as in VTC, arXiv 2401.00588), and both are divided by the weight.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from graftwork.engine.core.events import PromptAdmitted, RequestFinished, RequestOutput, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
_WINDOW_S = 30.0
"""The length of the windows in which Jain's index is taken."""


def jain(values: Sequence[float]) -> float:
    """Returns Jain's index of fairness: 1 if all values are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """Returns the smallest value that at least `fraction` of all values do not exceed; None if there are no values."""
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else None


@dataclass(slots=True)
class TenantFigures:
    """What one tenant saw, in seconds and tokens."""

    weight: float = 1.0
    arrived: int = 0
    finished: int = 0
    refused: int = 0
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Between the tokens of an answer."""
    turn_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Of turns of agent programs, from sending to the last token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Open:
    tenant: str
    arrived_at: float
    last_token_at: float | None = None


class DriftMeter:
    """Tracks, for each pair of tenants, how much their service differs over any interval in which both are backlogged.

    Over an interval the difference is that of its ends. So the largest one over all intervals is the distance between
    the highest and the lowest difference since both became backlogged.
    """

    def __init__(self) -> None:
        self.widest: dict[tuple[str, str], float] = {}
        self._range: dict[tuple[str, str], tuple[float, float]] = {}

    def observe(self, service: dict[str, float], backlogged: set[str]) -> None:
        for pair in [pair for pair in self._range if not backlogged.issuperset(pair)]:
            del self._range[pair]
        for pair in combinations(sorted(backlogged), 2):
            apart = service[pair[0]] - service[pair[1]]
            low, high = self._range.get(pair, (apart, apart))
            self._range[pair] = low, high = min(low, apart), max(high, apart)
            self.widest[pair] = max(self.widest.get(pair, 0.0), high - low)


class Meter:
    """Gets every arrival and every output of one run."""

    def __init__(self) -> None:
        self.tenants: dict[str, TenantFigures] = defaultdict(TenantFigures)
        self.service: dict[str, float] = defaultdict(float)
        self.drift = DriftMeter()
        self.jain_by_window: list[float] = []
        self.longest_input = 0
        self._open: dict[RequestId, _Open] = {}
        self._window_ends = _WINDOW_S
        self._window_service: dict[str, float] = {}
        self._window_backlogged: set[str] | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def longest_wait_s(self, now: float) -> float:
        """Returns for how long the request that has waited longest has had no token."""
        waits = (now - one.arrived_at for one in self._open.values() if one.last_token_at is None)
        return max(waits, default=0.0)

    def arrived(self, request: EngineRequest, now: float) -> None:
        name = request.domain.decode()
        self._open[request.request_id] = _Open(name, now)
        self.tenants[name].arrived += 1
        self.tenants[name].weight = request.weight
        self.longest_input = max(self.longest_input, len(request.prompt_token_ids))

    def note(self, output: RequestOutput, now: float) -> None:
        one = self._open[output.request_id]
        figures = self.tenants[one.tenant]
        match output.event:
            case PromptAdmitted(cache):
                figures.prompt_tokens += cache.prompt_tokens
                figures.cached_tokens += cache.cached_tokens
                self.service[one.tenant] += INPUT_PRICE * cache.recomputed_tokens / figures.weight
            case TokensGenerated(token_ids):
                if one.last_token_at is None:
                    figures.ttft_s.append(now - one.arrived_at)
                else:
                    figures.gaps_s.append(now - one.last_token_at)
                one.last_token_at = now
                figures.output_tokens += len(token_ids)
                self.service[one.tenant] += OUTPUT_PRICE * len(token_ids) / figures.weight
            case RequestFinished():
                figures.finished += 1
                del self._open[output.request_id]
            case GraftworkError():
                figures.refused += 1
                del self._open[output.request_id]

    def turn_ended(self, tenant: str, seconds: float) -> None:
        self.tenants[tenant].turn_s.append(seconds)

    def observe(self, backlogged: set[str], now: float) -> None:
        """Records which tenants are backlogged now. Must be called once in each step, after admission."""
        self.drift.observe(self.service, backlogged)
        if now >= self._window_ends:
            self._close_window(now)
        self._window_backlogged = (
            backlogged if self._window_backlogged is None else self._window_backlogged & backlogged
        )

    def _close_window(self, now: float) -> None:
        names = self._window_backlogged or set()
        if len(names) > 1:
            gained = [self.service[name] - self._window_service.get(name, 0.0) for name in sorted(names)]
            self.jain_by_window.append(jain(gained))
        self._window_service, self._window_backlogged = dict(self.service), None
        self._window_ends = now + _WINDOW_S
