"""Noise that depends on (seed, choice, position) and on nothing else.

One number a row, made by hashing a counter: neither the batch, nor the cache, nor a draft, nor an earlier draw can
change it. Never keeps a state.
"""

from graftwork.engine.core.step import SampleSpec

_WORD = (1 << 64) - 1
_BITS = 53
"""What a double holds."""


def uniform(spec: SampleSpec) -> float:
    """Evenly from [0, 1)."""
    state = _mix(spec.seed & _WORD)
    for part in (spec.params.choice, spec.position):
        state = _mix(state ^ (part * 0xD1342543DE82EF95 & _WORD))
    return (state >> (64 - _BITS)) / (1 << _BITS)


def _mix(x: int) -> int:
    """One step of SplitMix64 (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
