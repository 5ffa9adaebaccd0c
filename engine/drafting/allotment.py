"""How many drafted tokens each sequence of a step has verified: where they are worth most, and no more than pays.

A step makes one token for every sequence, and one more for each guess that comes true. Of all guesses in the batch the
likeliest are taken first; a guess is never likelier than the one before it, so each sequence gets the beginning of its
draft. As many are taken as give the most tokens per second by the measured cost of rows; none where that is no gain.
Source: the marginal gains of vLLM's adaptive verification, with exact costs for every number of rows.
"""

from collections.abc import Callable, Sequence

_LEAST_GAIN = 1.02
"""Tokens per second with drafts over those without that make it worth while."""


def allot(
    survivals: Sequence[Sequence[float]], seconds: Callable[[int], float], *, num_rows: int, spare_rows: int
) -> list[int]:
    """How many tokens of each draft to verify.

    survivals: for each sequence that makes a token in this step, the chances of its draft's tokens to come true, each
    at most the one before; `num_rows` are in the step without drafts, and at most `spare_rows` come to them.
    """
    ranked = sorted(
        ((chance, index) for index, chances in enumerate(survivals) for chance in chances),
        key=lambda guess: -guess[0],
    )[: max(spare_rows, 0)]
    made = float(len(survivals))
    best, num_taken = _LEAST_GAIN * made / seconds(num_rows) if ranked else 0.0, 0
    for count, (chance, _) in enumerate(ranked, start=1):
        made += chance
        pace = made / seconds(num_rows + count)
        if pace > best:
            best, num_taken = pace, count
    taken = [0] * len(survivals)
    for _, index in ranked[:num_taken]:
        taken[index] += 1
    return taken
