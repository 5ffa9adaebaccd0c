"""Measures how well requests meet their objectives by service tier: burn rates, and what is left of the error budget.

    Objective       a limit (first token, time between tokens) and the share of requests that must be within it
    ObjectiveMeter  counts good and bad requests in slices of time, and computes burn rates from them

The error budget is the share of requests that may be bad: 1 - target. The burn rate over a window is the share of bad
requests in it, divided by the error budget: 1 spends the budget exactly, 14.4 spends a month's budget in 50 hours.
Never stores anything: a gateway that starts again begins with a whole budget, and each gateway counts its own requests.
Source: Google, The Site Reliability Workbook, chapter 5 (alerting on multiple windows and burn rates).
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graftwork.platform.clock import Clock

TIERS = ("priority", "default", "flex")
"""The service tiers that may have objectives and deadlines, the highest first."""
WINDOWS_S = {"5m": 300.0, "1h": 3600.0}
"""The windows of burn rates, in seconds, by the name that the metrics use."""
BUDGET_S = 86_400.0
"""The seconds over which the error budget is counted: a day."""
_SLICE_S = 10.0
"""Requests are counted in slices of so many seconds, so a window is exact to one slice."""
_PART = re.compile(r"([a-z]+)\.([a-z_]+)=([0-9.]+)")
_DEADLINE = re.compile(r"([a-z]+)=([0-9]{1,7})")


@dataclass(frozen=True, slots=True)
class Objective:
    """What the requests of one service tier are promised. None promises nothing."""

    ttft_s: float | None = None
    """The longest time in seconds to the first token."""
    itl_s: float | None = None
    """The longest mean time in seconds between two tokens of an answer."""
    target: float = 0.99
    """The share of requests, above 0 and below 1, that must be within each limit, and that must not fail."""


_FIELDS = {"ttft_ms": "ttft_s", "itl_ms": "itl_s", "target": "target"}


def parse_objectives(value: object) -> Mapping[str, Objective]:
    """Parses objectives by service tier, such as `priority.ttft_ms=500,priority.itl_ms=50,priority.target=0.999`.

    Returns a value that is parsed already as it is. Raises ValueError.
    """
    if isinstance(value, Mapping):
        return value
    found: dict[str, dict[str, float]] = {}
    for part in filter(None, (each.strip() for each in str(value).split(","))):
        matched = _PART.fullmatch(part)
        if matched is None or matched[1] not in TIERS or matched[2] not in _FIELDS:
            names = ", ".join(_FIELDS)
            raise ValueError(f"give parts such as priority.ttft_ms=500, with a tier of {', '.join(TIERS)} and {names}")
        number = float(matched[3]) if matched[3].count(".") < 2 and matched[3] != "." else 0.0
        if number <= 0 or (matched[2] == "target" and number >= 1):
            raise ValueError("give times above 0, and targets above 0 and below 1")
        found.setdefault(matched[1], {})[_FIELDS[matched[2]]] = number / (1 if matched[2] == "target" else 1000)
    return {tier: Objective(**limits) for tier, limits in found.items()}


def parse_deadlines(value: object) -> Mapping[str, float]:
    """Parses deadlines by service tier in milliseconds, such as `priority=1000,default=10000`, into seconds.

    Returns a value that is parsed already as it is. Raises ValueError.
    """
    if isinstance(value, Mapping):
        return value
    found = {}
    for part in filter(None, (each.strip() for each in str(value).split(","))):
        matched = _DEADLINE.fullmatch(part)
        if matched is None or matched[1] not in TIERS or not int(matched[2]):
            raise ValueError(f"give parts such as default=10000, with a tier of {', '.join(TIERS)}, in milliseconds")
        found[matched[1]] = int(matched[2]) / 1000
    return found


@dataclass(slots=True)
class _Slice:
    """Good and bad requests that ended in one slice of time."""

    number: int
    good: int = 0
    bad: int = 0


class _Counts:
    """The good and bad requests of one objective in the last day."""

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque()

    def add(self, now: float, *, is_good: bool) -> None:
        number = int(now // _SLICE_S)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
            while self._slices[0].number <= number - BUDGET_S / _SLICE_S:
                self._slices.popleft()
        last = self._slices[-1]
        last.good, last.bad = last.good + is_good, last.bad + (not is_good)

    def bad_share(self, now: float, window_s: float) -> float:
        """Returns the share of bad requests in the slices of the last `window_s` seconds. 0 without requests."""
        first = int(now // _SLICE_S) - window_s / _SLICE_S
        good = bad = 0
        for one in reversed(self._slices):
            if one.number <= first:
                break
            good, bad = good + one.good, bad + one.bad
        return bad / (good + bad) if good + bad else 0.0


class ObjectiveMeter:
    """Counts requests against their objectives. `Telemetry` exports the burn rates and budgets."""

    def __init__(self, objectives: Mapping[str, Objective], clock: Clock) -> None:
        """`objectives` maps service tiers to their objectives. Requests of other tiers are not counted."""
        self._objectives = objectives
        self._clock = clock
        self._counts = {(tier, kind): _Counts() for tier in objectives for kind in _kinds(objectives[tier])}

    def note_first_token(self, tier: str, seconds: float) -> None:
        """Records the time in seconds from a request's arrival to its first token."""
        objective = self._objectives.get(tier)
        if objective is not None and objective.ttft_s is not None:
            self._counts[tier, "ttft"].add(self._clock.monotonic(), is_good=seconds <= objective.ttft_s)

    def note_between_tokens(self, tier: str, seconds: float) -> None:
        """Records the mean time in seconds between two tokens of one answer."""
        objective = self._objectives.get(tier)
        if objective is not None and objective.itl_s is not None:
            self._counts[tier, "itl"].add(self._clock.monotonic(), is_good=seconds <= objective.itl_s)

    def note_end(self, tier: str, *, failed: bool) -> None:
        """Records that a request has ended. `failed` tells whether the server was at fault, or refused it."""
        if tier in self._objectives:
            self._counts[tier, "success"].add(self._clock.monotonic(), is_good=not failed)

    def burn_rate(self, tier: str, kind: str, window_s: float) -> float:
        """Returns the burn rate of an objective over the last `window_s` seconds, exact to 10 s. `kind` is `ttft`, `itl`
        or `success`.
        """
        bad_share = self._counts[tier, kind].bad_share(self._clock.monotonic(), window_s)
        return bad_share / (1 - self._objectives[tier].target)

    def budget_left(self, tier: str, kind: str) -> float:
        """Returns the part of the last day's error budget that is left: 1 is all of it, and below 0 it is overspent."""
        return 1 - self.burn_rate(tier, kind, BUDGET_S)

    def readings(self) -> list[tuple[str, str, dict[str, float], float]]:
        """Returns for each tier and objective the burn rates by the names in WINDOWS_S, and the budget that is left."""
        return [
            (
                tier,
                kind,
                {name: self.burn_rate(tier, kind, window_s) for name, window_s in WINDOWS_S.items()},
                self.budget_left(tier, kind),
            )
            for tier, kind in self._counts
        ]


def _kinds(objective: Objective) -> Sequence[str]:
    limits = {"ttft": objective.ttft_s, "itl": objective.itl_s}
    return [*(kind for kind, limit in limits.items() if limit is not None), "success"]
