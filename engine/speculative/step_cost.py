"""What a step costs by its number of rows, learned from the steps themselves.

A straight line through what was measured lately. The steps of one engine are alike but for their rows, so the line's
slope is what one more row costs here and now: on this device, at these lengths of context, beside these neighbours. It
forgets within two hundred steps, and so follows contexts that grow and batches that fill. Where the rows have hardly
varied, the part of a step that all rows share is taken to cost what eight of them do.

Steps of a busy machine scatter, and an estimate that happens to be low would be acted on more than one that happens to
be high. So a row is taken to cost its estimate and the estimate's standard error.
"""

from math import sqrt

_MEMORY = 0.995
"""What a step's weight is multiplied by at every later one."""
_LONGEST_SURPRISE = 2.0
"""A step that the machine held up for longer than this times what was expected counts as this much."""
_SHARED_ROWS = 8
"""What a step costs before its first row, in rows, as long as nothing tells."""


class StepCost:
    """Seconds of a step of so many rows; only ratios between numbers of rows matter to who asks."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_rows = 1.0
        self._mean_seconds = 1.0
        self._variance = 0.0
        self._covariance = 0.0
        self._scatter = 0.0

    def seconds(self, num_rows: int) -> float:
        """What a step of `num_rows` is expected to take: more than nothing, and no less than one of fewer rows."""
        return max(self._mean_seconds + self.slope * (num_rows - self._mean_rows), 0.05 * self._mean_seconds)

    @property
    def slope(self) -> float:
        """Seconds of one more row: from nothing to an equal share of the step."""
        doubt = (1 + 0.05 * self._mean_rows) ** 2  # in squared rows: a spread so narrow tells little
        most = self._mean_seconds / self._mean_rows
        guess = self._mean_seconds / (self._mean_rows + _SHARED_ROWS)
        slope = (self._covariance + doubt * guess) / (self._variance + doubt)
        return min(max(slope, 0.0) + self._standard_error(doubt), most)

    def _standard_error(self, doubt: float) -> float:
        explained = self._covariance**2 / self._variance if self._variance else 0.0
        unexplained = max(self._scatter - explained, 0.0)
        return sqrt(unexplained / (max(self._weight, 1.0) * (self._variance + doubt)))

    def record(self, num_rows: int, seconds: float) -> None:
        """Take in how long a step of `num_rows` took."""
        if seconds <= 0:
            return
        if self._weight:
            expected = self.seconds(num_rows)
            seconds = min(max(seconds, expected / _LONGEST_SURPRISE), expected * _LONGEST_SURPRISE)
        self._weight = _MEMORY * self._weight + 1
        share = 1 / self._weight
        rows_off, seconds_off = num_rows - self._mean_rows, seconds - self._mean_seconds
        self._mean_rows += share * rows_off
        self._mean_seconds += share * seconds_off
        self._variance = (1 - share) * (self._variance + share * rows_off * rows_off)
        self._covariance = (1 - share) * (self._covariance + share * rows_off * seconds_off)
        self._scatter = (1 - share) * (self._scatter + share * seconds_off * seconds_off)
