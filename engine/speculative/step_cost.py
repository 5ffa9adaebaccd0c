"""Estimates how long a step takes by its number of rows, from recent decoding steps.

Owns a weighted linear fit of seconds over rows. Its slope is the present cost of one more row. A step loses its weight
over about two hundred later steps, so the fit follows growing contexts.
If the number of rows has hardly varied, the fixed part of a step is assumed to cost as much as eight rows.
The standard error is added to the slope, because an estimate that is too low would cause useless drafts.
"""

from math import sqrt

_MEMORY = 0.995
"""The factor by which a step's weight fades with each later step."""
_MAX_DEVIATION = 2.0
"""A measured duration is limited to between 1/2 and 2 times the expected one."""
_SHARED_ROWS = 8
"""The assumed fixed cost of a step, in rows."""


class StepCost:
    """Estimates the seconds of a step by its number of rows. Callers use only ratios of these estimates."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_rows = 1.0
        self._mean_seconds = 1.0
        self._variance = 0.0
        self._covariance = 0.0
        self._scatter = 0.0

    def seconds(self, num_rows: int) -> float:
        """Returns the expected seconds of a step of `num_rows`. They are above zero, and never fall as rows grow."""
        return max(self._mean_seconds + self.slope * (num_rows - self._mean_rows), 0.05 * self._mean_seconds)

    @property
    def slope(self) -> float:
        """Returns the seconds of one more row, between zero and the mean seconds per row."""
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
        """Records the duration of a step of `num_rows`."""
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
