"""How long a step takes by its number of rows, learned from recent decoding steps.

Owns a weighted linear fit of seconds over rows. Its slope is the cost of one more row at present: on this device, with
these context lengths and batches. Steps fade within about two hundred, so the fit follows growing contexts.
While the number of rows has hardly varied, the fixed part of a step is assumed to cost as much as eight rows.
The standard error is added to the slope: an estimate that is too low by chance would cause useless drafts.
"""

from math import sqrt

_MEMORY = 0.995
"""The factor by which a step's weight fades with each later step."""
_MAX_DEVIATION = 2.0
"""A step counts as at most this many times its expected duration, and at least its inverse."""
_SHARED_ROWS = 8
"""The assumed fixed cost of a step, in rows."""


class StepCost:
    """Seconds of a step by its rows. Callers use only the ratios between them."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_rows = 1.0
        self._mean_seconds = 1.0
        self._variance = 0.0
        self._covariance = 0.0
        self._scatter = 0.0

    def seconds(self, num_rows: int) -> float:
        """The expected seconds of a step of `num_rows`: above zero, and never falling with more rows."""
        return max(self._mean_seconds + self.slope * (num_rows - self._mean_rows), 0.05 * self._mean_seconds)

    @property
    def slope(self) -> float:
        """Seconds of one more row, between zero and the mean seconds per row."""
        doubt = (1 + 0.05 * self._mean_rows) ** 2  # in squared rows: a smaller variance tells little
        most = self._mean_seconds / self._mean_rows
        guess = self._mean_seconds / (self._mean_rows + _SHARED_ROWS)
        slope = (self._covariance + doubt * guess) / (self._variance + doubt)
        return min(max(slope, 0.0) + self._standard_error(doubt), most)

    def _standard_error(self, doubt: float) -> float:
        explained = self._covariance**2 / self._variance if self._variance else 0.0
        unexplained = max(self._scatter - explained, 0.0)
        return sqrt(unexplained / (max(self._weight, 1.0) * (self._variance + doubt)))

    def record(self, num_rows: int, seconds: float) -> None:
        """Take in the duration of a step of `num_rows`."""
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
