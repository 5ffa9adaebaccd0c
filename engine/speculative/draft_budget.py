"""Decides how many draft tokens of each request a step verifies, from their estimated gain and cost.

A step generates one token for each request, and one more for each accepted draft token. Each token that a step computes
is one row of its batch. Every possible number of draft tokens is tried, the likeliest draft tokens of the batch first.
The number that gives the most tokens per second is chosen. A draft token is never likelier to be accepted than the one
before it, so each request gets a prefix of its draft. Source: the adaptive verification of vLLM.

Owns the estimate of a step's duration in seconds: a line fitted to the durations and row numbers of earlier steps. The
slope of the line is the cost of one more row. Old steps count less than new ones, so the fit follows growing contexts.
If the number of rows has hardly varied, the fixed cost of a step is assumed to be the cost of eight rows. The standard
error of the slope is added to it, because too low an estimate would cause useless drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

_CERTAIN = 0.95
"""The least probability at which a draft token is nearly certain to be accepted."""
LEAST_GAIN = 0.1
"""The least gain in tokens per second, as a fraction, for which drafts are verified. The estimates are not more exact
than that.
"""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How many draft tokens one step verifies for each request, and the expected gain from them."""

    lengths: tuple[int, ...]
    """The number of draft tokens that the step verifies for each request."""
    gain: float
    """The expected relative rise of tokens per second. 0.1 means 10 % more than without drafts."""


def budget_drafts(
    survivals: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    spare_rows: int,
    *,
    only_certain: bool = False,
) -> DraftBudget:
    """Returns how many draft tokens of each request the step should verify, at most `spare_rows` in all.

    `survivals` has one list for each request that generates a token in this step: the probability that each of its
    draft tokens is accepted. The probabilities in a list never rise. `seconds` returns the duration of a step from its
    number of rows (the tokens that it computes). Prompt chunks in the same step are ignored; with `only_certain`, draft tokens
    take no time from them, because only those are verified that would have to be computed soon anyway.
    """
    least = _CERTAIN if only_certain else 0.0
    ranked = sorted(
        ((chance, index) for index, chances in enumerate(survivals) for chance in chances if chance >= least),
        reverse=True,
    )
    num_rows = len(survivals)
    expected_tokens = float(num_rows)
    best = without_drafts = expected_tokens / seconds(num_rows)
    num_taken = 0
    for count, (chance, _) in enumerate(ranked[: max(spare_rows, 0)], start=1):
        expected_tokens += chance
        tokens_per_second = expected_tokens / seconds(num_rows + count)
        if tokens_per_second > max(best, (1 + LEAST_GAIN) * without_drafts):
            best, num_taken = tokens_per_second, count
    lengths = [0] * len(survivals)
    for _, index in ranked[:num_taken]:
        lengths[index] += 1
    return DraftBudget(tuple(lengths), best / without_drafts - 1 if num_taken else 0.0)


_SMOOTHING = 0.2


_LEAST_RATIO = 2.0
"""The least ratio of a draft's gain to the time to choose it. The ratio is above 1 because learning takes time too."""


_LONGEST_PAUSE = 64
"""The most steps of a pause."""


class Pause:
    """A pause of some steps. Each pause is twice as long as the one before, up to 64 steps, unless a longer one is asked
    for.
    """

    def __init__(self) -> None:
        self._length = 0
        """The length of the present pause, in steps."""
        self._steps_left = 0
        self._least = 0
        self._batch_size = 0
        """Requests in the batch when the pause began."""

    def is_over(self, num_requests: int = 1) -> bool:
        """Counts a step, which generates tokens for `num_requests` requests. Returns whether there is no pause in it.

        A pause ends early if the number of requests falls to half of what it was when the pause began.
        """
        if self._ends_early(num_requests):
            self.end()
        self._steps_left = max(self._steps_left - 1, 0)
        return self._steps_left == 0

    def lasts(self, num_requests: int = 1) -> bool:
        """Returns whether the next call of `is_over` will return False. Changes nothing."""
        return self._steps_left > 1 and not self._ends_early(num_requests)

    def begin(self, num_requests: int = 1, least: int = 0) -> None:
        """Begins a pause, of twice the length of the one before, and at least of `least` steps."""
        self._length = min(max(2 * self._length, 2), _LONGEST_PAUSE)
        self._steps_left, self._least, self._batch_size = max(self._length, least), least, num_requests

    def shorten(self) -> None:
        """Cuts the pause to the least steps that were asked for, and the next one too."""
        self._length = 0
        self._steps_left = min(self._steps_left, self._least)

    def end(self) -> None:
        """Ends the pause. The next one will be short."""
        self._length = self._steps_left = self._batch_size = 0

    def _ends_early(self, num_requests: int) -> bool:
        return 2 * num_requests <= self._batch_size


class DraftBackoff:
    """Pauses drafting while drafts take more time than they save."""

    def __init__(self) -> None:
        self._gain = 0.2
        """Average gain of drafts, as a fraction of a step's tokens."""
        self._cost = 0.0
        """Average time to choose drafts, as a fraction of a step's time."""
        self._pause = Pause()

    def should_draft(self, num_requests: int) -> bool:
        """Returns whether to draft in this step, which generates tokens for `num_requests` requests. Call it once a step."""
        return self._pause.is_over(num_requests)

    def pauses(self, num_requests: int) -> bool:
        """Returns whether the next call of `should_draft` will return False. Changes nothing."""
        return self._pause.lasts(num_requests)

    def record(self, num_requests: int, gain: float, cost: float) -> None:
        """Records what drafting for one step has given and cost.

        `gain` is the expected number of additional tokens, as a fraction of the tokens without drafts. `cost` is the
        time to choose the drafts, as a fraction of the step's duration.
        """
        self._gain += _SMOOTHING * (gain - self._gain)
        self._cost += _SMOOTHING * (cost - self._cost)
        if self._gain >= _LEAST_RATIO * self._cost:
            self._pause.end()
        else:
            self._pause.begin(num_requests)


_MEMORY = 0.995
"""The factor by which a step's weight fades with each later step."""


_MAX_DEVIATION = 2.0
"""A measured duration is limited to between 1/2 and 2 times the expected one."""


_SHARED_ROWS = 8
"""The assumed fixed cost of a step, in rows."""


class StepCost:
    """Estimates the duration of a step from its number of rows (the tokens that it computes).

    Callers must use only ratios of these estimates, because before the first measurement their unit is arbitrary.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_rows = 1.0
        self._mean_seconds = 1.0
        self._variance = 0.0
        self._covariance = 0.0
        self._scatter = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether a step has been recorded. Before, the unit of the estimates is arbitrary."""
        return self._weight > 0

    def seconds(self, num_rows: int) -> float:
        """Returns the expected duration, in seconds, of a step that computes `num_rows` tokens.

        The result is above zero, and never falls when `num_rows` grows.
        """
        return max(self._mean_seconds + self.slope * (num_rows - self._mean_rows), 0.05 * self._mean_seconds)

    @property
    def slope(self) -> float:
        """The seconds by which one more token makes a step longer. Between zero and the mean seconds per token of a
        step.
        """
        doubt = (1 + 0.05 * self._mean_rows) ** 2  # in squared rows; a smaller variance is too little to fit a slope
        most = self._mean_seconds / self._mean_rows
        guess = self._mean_seconds / (self._mean_rows + _SHARED_ROWS)
        slope = (self._covariance + doubt * guess) / (self._variance + doubt)
        return min(max(slope, 0.0) + self._standard_error(doubt), most)

    def _standard_error(self, doubt: float) -> float:
        explained = self._covariance**2 / self._variance if self._variance else 0.0
        unexplained = max(self._scatter - explained, 0.0)
        return sqrt(unexplained / (max(self._weight, 1.0) * (self._variance + doubt)))

    def record(self, num_rows: int, seconds: float) -> None:
        """Records that a step that computed `num_rows` tokens took `seconds`."""
        if seconds <= 0:
            return
        if self._weight:
            expected = self.seconds(num_rows)
            seconds = min(max(seconds, expected / _MAX_DEVIATION), expected * _MAX_DEVIATION)
        self._weight = _MEMORY * self._weight + 1
        share = 1 / self._weight
        rows_off, seconds_off = num_rows - self._mean_rows, seconds - self._mean_seconds
        self._mean_rows += share * rows_off
        self._mean_seconds += share * seconds_off
        self._variance = (1 - share) * (self._variance + share * rows_off * rows_off)
        self._covariance = (1 - share) * (self._covariance + share * rows_off * seconds_off)
        self._scatter = (1 - share) * (self._scatter + share * seconds_off * seconds_off)
