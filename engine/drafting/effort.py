"""Whether guessing is worth the time that it takes the loop, and when to try again if it is not.

In a large batch of short contexts a row costs about what a token is worth, so that almost no guess pays, and asking
every drafter in every step would only make the steps longer.
"""

_SMOOTHING = 0.1
_STEPS_OF_REST = 15


class Effort:
    """Averages of what drafts gain and what they cost, both as shares of a step."""

    def __init__(self) -> None:
        self._gain = 0.2
        self._cost = 0.0
        self._rest = 0

    def is_called_for(self) -> bool:
        """Whether to guess in this step; asked once a step."""
        if self._gain >= self._cost or self._rest == 0:
            self._rest = _STEPS_OF_REST
            return True
        self._rest -= 1
        return False

    def record(self, gain: float, cost: float) -> None:
        """A step's drafts are expected to gain this share of its tokens, and took this share of its time."""
        self._gain += _SMOOTHING * (gain - self._gain)
        self._cost += _SMOOTHING * (cost - self._cost)
