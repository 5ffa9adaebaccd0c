"""How many drafted tokens each sequence of a step has verified: where they are worth most, and no more than pays.

A step makes one token for every sequence, and one more for each guess that comes true. Of all guesses in the batch the
likeliest are taken first; a guess is never likelier than the one before it, so each sequence gets the beginning of its
draft. As many are taken as give the most tokens per second by the measured cost of rows; none where that is no gain.
Source: the marginal gains of vLLM's adaptive verification, over every number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LEAST_GAIN = 0.1
"""What drafts must add to the tokens per second to be worth while: an estimate is no more exact than that."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """A step's verify rows."""

    lengths: tuple[int, ...]
    """By sequence."""
    gain: float
    """What they are expected to add to the tokens per second, as a share; 0 without any."""


def allot(survivals: Sequence[Sequence[float]], seconds: Callable[[int], float], spare_rows: int) -> Allotment:
    """How many tokens of each draft to verify, `spare_rows` at most in all.

    survivals: for each sequence that makes a token in this step, the chances of its draft's tokens to come true, each
    at most the one before. Chunks of prompts in the same step are left out of the account: a guess delays them by what
    it costs among decoding rows, and they make it no cheaper.
    """
    ranked = sorted(((chance, index) for index, chances in enumerate(survivals) for chance in chances), reverse=True)
    num_rows = len(survivals)
    made = float(num_rows)
    pace = least = made / seconds(num_rows)
    num_taken = 0
    for count, (chance, _) in enumerate(ranked[: max(spare_rows, 0)], start=1):
        made += chance
        faster = made / seconds(num_rows + count)
        if faster > max(pace, (1 + _LEAST_GAIN) * least):
            pace, num_taken = faster, count
    lengths = [0] * len(survivals)
    for _, index in ranked[:num_taken]:
        lengths[index] += 1
    return Allotment(tuple(lengths), pace / least - 1 if num_taken else 0.0)


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
