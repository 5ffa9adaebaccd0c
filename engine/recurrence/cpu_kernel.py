"""Advances recurrent states on a CPU, by one compiled loop over heads, tokens and the numbers of a head's state.

A head's state stays in the first cache while all tokens of a segment pass, so a prompt reads each state once and not once
for each token. Invariant: the bits of a token follow from the state and from its own row alone. Each number of the state is
computed by the same two products and one sum in fp32 as in torch (scan.py), none of them fused.

numba compiles this file at the first call, and again when this file changes. Importing this file loads numba, so import it
only on CPUs.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Floats = NDArray[np.float32]

_SIGNATURE = "(f4[:, :, ::1], f4[:, :], f4[:, :, ::1], f4[:, :, :], f4[:, :, :], f4[:, :, ::1])"


def _compiled(function: Compiled) -> Compiled:
    """Compiles a function, and keeps the result for the next start if this machine has a folder for it."""
    options: dict[str, Any] = {"error_model": "numpy", "boundscheck": False, "nogil": True}
    try:
        return cast(Compiled, numba.njit(_SIGNATURE, cache=True, **options)(function))
    except RuntimeError:  # no folder can be written: the function is compiled at each start
        return cast(Compiled, numba.njit(_SIGNATURE, **options)(function))


@_compiled
def advance(heads: Floats, decays: Floats, values: Floats, B: Floats, C: Floats, y: Floats) -> None:
    """Advances the state of all heads, in place, by some tokens, and writes what each token reads from it.

    heads: [heads, state_size, head_dim]; decays: [num_tokens, heads]; values: [num_tokens, heads, head_dim], times step
    sizes; B, C: [num_tokens, groups, state_size]; y: [num_tokens, heads, head_dim].
    """
    heads_of_group = heads.shape[0] // B.shape[1]
    for head in range(heads.shape[0]):
        group = head // heads_of_group
        for token in range(decays.shape[0]):
            decay, value, read = decays[token, head], values[token, head], y[token, head]
            read[:] = 0
            for number in range(heads.shape[1]):
                row, b, c = heads[head, number], B[token, group, number], C[token, group, number]
                for feature in range(row.shape[0]):
                    row[feature] = row[feature] * decay + b * value[feature]
                    read[feature] += row[feature] * c
