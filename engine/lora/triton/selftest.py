"""Tests the Triton LoRA kernels on a device at the engine's start, before any request uses them.

Triton compiles a kernel at its first launch. A machine may lack the tools that Triton needs for this, and on a new
device the results may be wrong. The test applies a few small adapters with all kernels, and compares the results with
plain torch.
"""

from contextlib import nullcontext

import torch

from graftwork.engine.lora.triton.launch import apply_lora
from graftwork.engine.lora.triton.launch_plan import GROUPED_TILE_ROWS, ROW_WISE
from graftwork.engine.lora.triton.random_adapters import random_slots, with_random_columns
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.slice_table import SlotPairs, build_table
from graftwork.engine.lora.triton.tiles import RowOwner, build_segments

_SEED = 20261
_IN_FEATURES = 64
_WIDTHS = (48, 16)
_RANKS = ((8, 16), (24, 0), (8, 8))
_OWNERS: tuple[RowOwner | None, ...] = (0, None, ((0, 0.5), (1, 0.25)), 1, 2, 2)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error, relative to the largest value: two roundings of the output, and a margin for another order of the
sums.
"""


def why_kernels_fail(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns what is wrong with the Triton kernels on a device, as a text for the log.

    Returns None if their results agree with plain torch.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            errors = {tile_rows: _error(device, dtype, tile_rows) for tile_rows in (ROW_WISE, GROUPED_TILE_ROWS[0])}
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"
    wrong = [f"{error:.3g} at {rows} rows a tile" for rows, error in errors.items() if not error <= _TOLERANCE[dtype]]
    return f"results differ from plain torch by {', '.join(wrong)}, of the largest" if wrong else None


def _error(device: torch.device, dtype: torch.dtype, tile_rows: int) -> float:
    """Returns the largest error of a batch, relative to the largest value of the reference."""
    generator = torch.Generator().manual_seed(_SEED)
    slots: list[SlotPairs] = [*random_slots(_RANKS, _IN_FEATURES, _WIDTHS, dtype, generator)]
    slots[2] = with_random_columns(random_slots(_RANKS, _IN_FEATURES, _WIDTHS, dtype, generator)[2], _WIDTHS, generator)
    x = torch.randn(len(_OWNERS), _IN_FEATURES, generator=generator).to(dtype)
    base = torch.randn(len(_OWNERS), sum(_WIDTHS), generator=generator).to(dtype)
    expected = add_lora(x, base, build_segments(_OWNERS), slots, _WIDTHS)

    y = base.to(device, copy=True)
    table = build_table(slots, _WIDTHS, _IN_FEATURES, dtype, device)
    apply_lora(x.to(device), y, table, build_segments(_OWNERS, device, tile_rows=tile_rows))
    return ((y.cpu().float() - expected.float()).abs().max() / expected.abs().max()).item()
