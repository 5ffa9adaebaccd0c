"""Makes the random numbers for sampling. A number depends only on the request's seed, on the position of the sampled
token, and on the index of the choice (a request may ask for several answers, called choices).

Owns the hash that makes the numbers. Never keeps a state: batches, caches, drafts and earlier numbers have no effect.
The numbers must stay the same in every version, because equal seeds give clients equal answers.
"""

from graftwork.engine.core.step import SampleSpec

_WORD = (1 << 64) - 1
_BITS = 53
"""The bits of a double's mantissa."""


def uniform(spec: SampleSpec) -> float:
    """Returns the random number that chooses the token of `spec`, uniform in [0, 1). Equal specs give equal numbers."""
    state = _mix(spec.seed & _WORD)
    for part in (spec.params.choice, spec.position):
        state = _mix(state ^ (part * 0xD1342543DE82EF95 & _WORD))
    return (state >> (64 - _BITS)) / (1 << _BITS)


def _mix(x: int) -> int:
    """Returns the result of one step of the hash SplitMix64 (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
