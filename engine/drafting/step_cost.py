"""What a step costs by its number of rows, learned from the steps themselves.

Knots at the powers of two, straight lines between them. A measured step moves the two knots beside it at once and
all others a little in proportion, so that a machine that grows slower, or contexts that grow longer, are followed where
nothing is measured, too. Only ratios between numbers of rows matter to who asks.
"""

_KNOTS = 12
"""Up to 2,048 rows; the last line goes on beyond them."""
_NEAR = 0.2
"""How much of its error a measured step mends at its own place…"""
_FAR = 0.02
"""…and everywhere else."""
_LONGEST_SURPRISE = 2.0
"""A step that the machine held up for longer than this times what was expected counts as this much."""
_FIRST_GUESS_PER_ROW = 0.04
"""Before anything is measured, a row costs this part of a step of one row."""


class StepCost:
    """Seconds of a step of so many rows."""

    def __init__(self) -> None:
        self._seconds = [1 + _FIRST_GUESS_PER_ROW * ((1 << knot) - 1) for knot in range(_KNOTS)]
        self._is_measured = False

    def seconds(self, num_rows: int) -> float:
        """What a step of `num_rows`, at least 1, is expected to take; never less than one of fewer rows."""
        knot, share = _place(num_rows)
        lower, upper = self._seconds[knot], self._seconds[knot + 1]
        return lower + share * max(upper - lower, 0.0)

    def record(self, num_rows: int, seconds: float) -> None:
        """Take in how long a step of `num_rows` took."""
        if seconds <= 0:
            return
        ratio = seconds / self.seconds(num_rows)
        if self._is_measured:
            ratio = min(max(ratio, 1 / _LONGEST_SURPRISE), _LONGEST_SURPRISE)
        self._scale(1 + (ratio - 1) * (_FAR if self._is_measured else 1.0))
        self._is_measured = True
        self._bend(num_rows, ratio)

    def _scale(self, factor: float) -> None:
        self._seconds = [seconds * factor for seconds in self._seconds]

    def _bend(self, num_rows: int, ratio: float) -> None:
        """Move the knots beside `num_rows`, and push those out of the way that would make more rows cheaper."""
        knot, share = _place(num_rows)
        share = min(share, 1.0)
        for index, weight in ((knot, 1 - share), (knot + 1, share)):
            self._seconds[index] *= 1 + (ratio - 1) * _NEAR * weight
        for index in range(knot - 1, -1, -1):
            self._seconds[index] = min(self._seconds[index], self._seconds[index + 1])
        for index in range(1, _KNOTS):
            self._seconds[index] = max(self._seconds[index], self._seconds[index - 1])


def _place(num_rows: int) -> tuple[int, float]:
    """The knot before a number of rows, and how far it is on the way to the next."""
    knot = min(max(num_rows, 1).bit_length() - 1, _KNOTS - 2)
    return knot, num_rows / (1 << knot) - 1
