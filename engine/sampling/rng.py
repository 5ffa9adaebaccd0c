"""Makes random numbers that depend on (seed, choice, position) and on nothing else.

Owns the hash that makes them. Never keeps a state: batches, caches, drafts and earlier draws cannot change a number.
The numbers must stay the same in every version, because equal seeds give clients equal answers.
"""

from graftwork.engine.core.step import SampleSpec

_WORD = (1 << 64) - 1
_BITS = 53
"""The bits of a double's mantissa."""


def uniform(spec: SampleSpec) -> float:
    """Returns a uniform number in [0, 1)."""
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
