"""Whether guessing is worth the time that it takes the loop, and when to try again if it is not.

In a large batch of short contexts a row costs about what a token is worth, so that almost no guess pays, and asking
every drafter in every step would only make the steps longer. The rest between two tries doubles as long as they bring
nothing, and ends at once when the batch has become half as large.
"""

_SMOOTHING = 0.2
_WORTH = 2.0
"""What drafts must gain over the time that was taken to choose them: learning from them takes about as much again."""
_LONGEST_REST = 64
"""Steps."""


class Effort:
    """Averages of what drafts gain and what they cost, both as shares of a step."""

    def __init__(self) -> None:
        self._gain = 0.2
        self._cost = 0.0
        self._pause = 0
        self._rest = 0
        self._batch = 0

    def is_called_for(self, num_sequences: int) -> bool:
        """Whether to guess in this step; asked once a step."""
        if 2 * num_sequences <= self._batch:
            self._pause = self._rest = self._batch = 0
        self._rest = max(self._rest - 1, 0)
        return self._rest == 0

    def record(self, num_sequences: int, gain: float, cost: float) -> None:
        """A step's drafts are expected to gain this share of its tokens, and took this share of its time."""
        self._gain += _SMOOTHING * (gain - self._gain)
        self._cost += _SMOOTHING * (cost - self._cost)
        is_worth_it = self._gain >= _WORTH * self._cost
        self._pause = 0 if is_worth_it else min(max(2 * self._pause, 2), _LONGEST_REST)
        self._rest, self._batch = self._pause, num_sequences
