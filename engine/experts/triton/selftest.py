"""Tests the kernels of routed layers on a device at the engine's start, before any request uses them.

The test arranges two small steps, one for each size of tiles, and compares their products with plain torch.
"""

from contextlib import nullcontext

import torch

from graftwork.engine.experts.triton.launch import (
    ExpertTable,
    TileGrid,
    arrange_launches,
    empty_rows,
    multiply_launch,
)

_SEED = 20262
_NUM_EXPERTS, _IN_FEATURES, _OUT_FEATURES = 3, 136, 72
_TOKENS = (7, 200)
"""Tokens of the two steps. The second has so many rows that tiles are large."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error, relative to the largest value: one rounding, and a margin for another order of the sums."""


def why_expert_kernels_fail(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns what is wrong with the kernels on a device, as a text for the log; None if they compute what torch does."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            errors = {num_tokens: _error(device, dtype, num_tokens) for num_tokens in _TOKENS}
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"
    wrong = [f"{error:.3g} for {tokens} tokens" for tokens, error in errors.items() if not error <= _TOLERANCE[dtype]]
    return f"results differ from plain torch by {', '.join(wrong)}, of the largest" if wrong else None


def _error(device: torch.device, dtype: torch.dtype, num_tokens: int) -> float:
    """Returns the largest error of a step, relative to the largest value of the reference."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(num_tokens, _IN_FEATURES, generator=generator).to(dtype)
    weights = torch.randn(_NUM_EXPERTS, _OUT_FEATURES, _IN_FEATURES, generator=generator).to(dtype)
    biases = torch.randn(_NUM_EXPERTS, _OUT_FEATURES, generator=generator).to(dtype)
    chosen = torch.rand(num_tokens, _NUM_EXPERTS, generator=generator).topk(2, dim=1).indices
    expected = torch.einsum("tcoi,ti->tco", weights.float()[chosen], x.float()) + biases.float()[chosen]

    on_device = [tensor.to(device) for tensor in (*weights, *biases)]
    table = ExpertTable.of(on_device[:_NUM_EXPERTS], on_device[_NUM_EXPERTS:])
    rows = empty_rows(TileGrid.of(chosen, _NUM_EXPERTS), device)
    for launch in arrange_launches(chosen.to(device), rows):
        launch.run()
    y = torch.empty(rows.grid.num_rows, _OUT_FEATURES, dtype=dtype, device=device)
    multiply_launch(x.to(device).index_select(0, rows.tokens), y, table, rows).run()
    found = y.cpu().float()[rows.places.cpu()]  # [num_tokens, num_chosen, out_features]
    return ((found - expected).abs().max() / expected.abs().max()).item()
