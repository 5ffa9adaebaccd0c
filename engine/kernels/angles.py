# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Prepares the angles of a step's rows once, in one launch: cosines and sines for positions that a table has, and for those
behind it.

    row_cosines[row] = table[position]                       where the table has the position, bit for bit
    row_cosines[row] = cos(position * frequency) * factor    behind it, with an angle in fp64

Requests with a rolling window have texts longer than the context, whose table is what it was. All layers then read these
rows as their table (see rotary.py). Without a table it gives the angles by which queries are turned back to their sinks
(see engine/attention/rolling_kernels.py).

fp32 would lose the last digits that distances need: a position of 2^20 and a frequency of 24 bits have an exact product in
fp64.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.launch import Launch


@triton.jit
def cos_and_sin(angles):
    """Returns cosines and sines of fp64 angles from 0 to 2^20, as fp64 with errors below 1e-11.

    The functions of CUDA's library serve any angle, and take local memory for it. Source: fdlibm (Sun 1993), whose first
    part of pi / 2 has 33 bits, so its products with 20 bits are exact; the sums are Taylor's.
    """
    quarters = tl.math.floor(angles * 0.6366197723675814 + 0.5)
    x = (angles - quarters * 1.57079632673412561417) - quarters * 6.07710050650619224932e-11
    square = x * x
    sine = square * (1.0 / 362880.0 - square * (1.0 / 39916800.0))
    sine = x - x * square * (1.0 / 6.0 - square * (1.0 / 120.0 - square * (1.0 / 5040.0 - sine)))
    cosine = square * (1.0 / 40320.0 - square * (1.0 / 3628800.0 - square * (1.0 / 479001600.0)))
    cosine = 1.0 - square * (0.5 - square * (1.0 / 24.0 - square * (1.0 / 720.0 - cosine)))
    quarter = quarters.to(tl.int32) % 4
    is_odd = quarter % 2 == 1
    cos, sin = tl.where(is_odd, sine, cosine), tl.where(is_odd, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where(quarter >= 2, -sin, sin)


@triton.jit(do_not_specialize=["table_rows"])
def step_angles_kernel(
    row_cosines,
    row_sines,
    table_cosines,
    table_sines,
    frequencies,
    positions,
    table_rows,
    factor,
    ROTARY_DIM: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Computes the angles of one row. A position below 0 counts as 0."""
    row = tl.program_id(0)
    position = tl.maximum(tl.load(positions + row).to(tl.int64), 0)
    pairs = tl.arange(0, BLOCK_PAIRS)
    mask = pairs < ROTARY_DIM // 2
    firsts = pairs * PAIR_STEP
    seconds = firsts + 1 if PAIR_STEP == 2 else firsts + ROTARY_DIM // 2
    if position < table_rows:
        cos = tl.load(table_cosines + position * ROTARY_DIM + firsts, mask=mask, other=1.0)
        sin = tl.load(table_sines + position * ROTARY_DIM + firsts, mask=mask, other=0.0)
    else:
        angles = position.to(tl.float64) * tl.load(frequencies + pairs, mask=mask, other=0.0).to(tl.float64)
        cos, sin = cos_and_sin(angles)
        cos, sin = cos.to(tl.float32) * factor, sin.to(tl.float32) * factor
    start = row.to(tl.int64) * ROTARY_DIM
    tl.store(row_cosines + start + firsts, cos, mask=mask)
    tl.store(row_cosines + start + seconds, cos, mask=mask)
    tl.store(row_sines + start + firsts, sin, mask=mask)
    tl.store(row_sines + start + seconds, sin, mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """One kind of rotary embedding, for any position."""

    frequencies: torch.Tensor  # fp32 [rotated features / 2], radians from one position to the next
    is_interleaved: bool = False
    """Whether the two features of a pair are neighbours."""
    factor: float = 1.0
    """What cosines and sines are multiplied by behind the table."""

    @property
    def rotated(self) -> int:
        """The number of rotated features of a head."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class RowAngles:
    """The cosines and sines of a step's rows, fp32 [num_rows, rotated features]."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @classmethod
    def empty(cls, rotation: Rotation, num_rows: int) -> "RowAngles":
        made = (
            torch.empty(num_rows, rotation.rotated, dtype=torch.float32, device=rotation.frequencies.device)
            for _ in range(2)
        )
        return cls(*made)


def step_angles_launch(
    angles: RowAngles,
    rotation: Rotation,
    positions: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Launch:
    """Returns the launch that writes the angles of `positions`, int32 or int64 [num_rows], to `angles`.

    `table` has the cosines and the sines of the first positions, fp32 [context, rotated features], contiguous; with None all
    angles are computed.
    """
    cosines, sines = (angles.cosines, angles.sines) if table is None else table
    arguments = {
        "row_cosines": angles.cosines,
        "row_sines": angles.sines,
        "table_cosines": cosines,
        "table_sines": sines,
        "frequencies": rotation.frequencies,
        "positions": positions,
        "table_rows": 0 if table is None else len(cosines),
        "factor": rotation.factor,
        "ROTARY_DIM": rotation.rotated,
        "PAIR_STEP": 2 if rotation.is_interleaved else 1,
        "BLOCK_PAIRS": triton.next_power_of_2(len(rotation.frequencies)),
    }
    options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(step_angles_kernel, (len(positions),), arguments, options)
